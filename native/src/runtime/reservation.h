// The cells that a batch's tokens take in every group. Unless commit() is called, the destructor makes them empty again.
// Cells that a window reused for the batch stay lost.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/kv_cache.h"
#include "runtime/batch.h"

namespace kvg {

class reservation {
public:
    // Finds empty cells in every group, and uses none of them yet. error(KVG_CACHE_FULL)
    reservation(kv_cache & cache, const batch & batch);
    ~reservation();
    reservation(const reservation &) = delete;
    reservation & operator=(const reservation &) = delete;

    // The cells of tokens [begin, begin + n) get their positions and sequences.
    void put(uint32_t begin, uint32_t n);
    // the cell of each token
    const std::vector<uint32_t> & slots(size_t group) const { return slots_[group]; }
    // the cells of tokens [begin, begin + n), in each group
    std::vector<std::vector<uint32_t>> slots_of(uint32_t begin, uint32_t n) const;
    void commit() { n_put_ = 0; }

private:
    kv_cache & cache_;
    const batch & batch_;
    std::vector<std::vector<uint32_t>> slots_;
    uint32_t n_put_ = 0;
};

} // namespace kvg
