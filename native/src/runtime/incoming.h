// Cells whose content comes from outside, piece by piece: reserved first, then written, then shown.
//
// Reserving and showing change the cells, and are calls on the context. Writing touches nothing but the rows of the reserved cells, which
// nobody else uses: it may happen in any thread, while the context decodes.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kvgraph.h"
#include "memory/kv_cache.h"

namespace kvg {

class incoming {
public:
    // groups: positions and dithers for each group of the cache. error(KVG_CACHE_FULL): nothing is reserved in any group
    incoming(kv_cache & cache, const kvg_kv_place * groups, int64_t n_groups);

    // From any thread. Rows of cells [cell_begin, cell_end), by their places among the reserved ones, in layers as kvg_incoming_rows
    // says. error(KVG_INVALID_ARGUMENT) when the reservation is over
    void write(const kvg_incoming_rows & in);

    // The rest as calls on the context.
    // The sequence sees the cells. error(KVG_INVALID_ARGUMENT) unless all rows were written, and the sequence ends before the first
    // position: nothing changed
    void show(int64_t seq);
    // The cells are empty again, when they were not shown.
    void give_back();
    // The cells are no longer the reservation's: the cache was cleared. Waits for a write under way.
    void forget();
    // Nobody will write or show any more; whoever calls the context next gives the cells back. From any thread
    void abandon();
    bool is_abandoned();

private:
    struct group_part {
        std::vector<uint32_t> cells;            // in the order of the positions
        std::vector<std::vector<bool>> written; // of each layer, which rows
        int32_t first_pos;
    };

    void require_live() const;

    kv_cache & cache_;
    std::vector<group_part> groups_;
    std::mutex mutex_; // of all below, and of rows being written
    bool is_live_ = true;
    bool is_abandoned_ = false;
};

// The reservations of a context that are not over.
class intake {
public:
    explicit intake(kv_cache & cache) : cache_(cache) {}

    std::shared_ptr<incoming> reserve(const kvg_kv_place * groups, int64_t n_groups);
    // Those that were abandoned give their cells back.
    void sweep();
    // Before the cache is cleared: none of them has cells any more.
    void forget_all();

private:
    kv_cache & cache_;
    std::vector<std::shared_ptr<incoming>> open_; // until they are abandoned: their cells must be given back
};

} // namespace kvg
