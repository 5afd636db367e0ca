// The cells that a batch's tokens take in every group, and those that they replace. Unless commit() is called, the destructor makes the
// first empty again, and gives the others back to their sequences. Cells that a window reused for the batch stay lost.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/kv_cache.h"
#include "runtime/batch.h"

namespace kvg {

// Of each group: the cells of the tokens, and those that their sequences have left for them.
struct cell_changes {
    std::vector<std::vector<uint32_t>> slots;
    std::vector<std::vector<left_cell>> left;

    // The first n tokens have no cells any more, and the sequences have again what was there.
    void undo(kv_cache & cache, size_t n) const noexcept;
};

class reservation {
public:
    // Finds empty cells in every group, and uses none of them yet. Where tokens repair, their sequences leave the cells at their positions.
    // error(KVG_CACHE_FULL)
    reservation(kv_cache & cache, const batch & batch);
    ~reservation() { changes_.undo(cache_, n_put_); }
    reservation(const reservation &) = delete;
    reservation & operator=(const reservation &) = delete;

    // The cells of tokens [begin, begin + n) get their positions and sequences.
    void put(uint32_t begin, uint32_t n);
    // the cell of each token
    const std::vector<uint32_t> & slots(size_t group) const { return changes_.slots[group]; }
    // the cells of tokens [begin, begin + n), in each group
    std::vector<std::vector<uint32_t>> slots_of(uint32_t begin, uint32_t n) const;
    // Returns what it takes to undo it all the same.
    cell_changes commit() noexcept;

private:
    kv_cache & cache_;
    const batch & batch_;
    cell_changes changes_;
    uint32_t n_put_ = 0;
};

// While it lives, no window loses what a batch's tokens see that repair.
class seen_guard {
public:
    explicit seen_guard(kv_cache & cache) : cache_(cache) {}
    ~seen_guard() { release(); }
    seen_guard(const seen_guard &) = delete;
    seen_guard & operator=(const seen_guard &) = delete;

    void hold(const batch & batch);
    void release() noexcept;

private:
    kv_cache & cache_;
    std::vector<int64_t> holds_;
};

} // namespace kvg
