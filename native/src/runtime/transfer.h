// K and V in and out: as floats for looking, as raw rows for saved states.
#pragma once

#include <cstdint>
#include <vector>

#include "kvgraph.h"
#include "memory/kv_cache.h"
#include "memory/packed_rows.h"
#include "runtime/upkeep.h"

namespace kvg {

struct composition; // runtime/compose.cpp

class transfer {
public:
    // The others must outlive it. n_threads: of the CPU
    transfer(kv_cache & cache, upkeep & upkeep, int n_threads) : cache_(cache), upkeep_(upkeep), n_threads_(n_threads) {}

    // K or V of a layer as (n_cells, n_head_kv, head_dim) floats; K rotated to the cells' positions.
    void read(int64_t layer, bool v, float * out, uint64_t n_floats);
    // Raw rows of cells as `want` says; K rotated to the cells' positions, with what dither it carries then.
    void read_rows(const kvg_kv_read_request & want);
    // The same of one layer, on its device where that can be.
    packed_rows pack(int64_t group, int64_t layer, const int32_t * cells, int64_t n_cells);
    // Replaces the cells of a sequence (seq < 0: every cell) by these, given for each group. All or nothing, but when the device fails
    // while rows are written: then the cache is broken.
    void replace(int64_t seq, const kvg_kv_rows * groups, int64_t n_groups, const kvg_kv_checkpoint_list & checkpoints,
                 const kvg_kv_state_list & states);
    // As kvg_kv_compose says. When the device fails while rows are written, the cache is broken.
    void compose(int64_t seq, const kvg_kv_composite * groups, int64_t n_groups);

private:
    kv_group & group_at(int64_t index);
    std::vector<uint32_t> cells_of(const kv_group & group, const int32_t * cells, int64_t n_cells);
    void write(kv_group & group, const kvg_kv_rows & in, const std::vector<uint32_t> & slots);
    // of each group without a window
    std::vector<composition> check_compositions(uint32_t seq, const kvg_kv_composite * groups, int64_t n_groups);
    std::vector<uint32_t> check_groups(const kvg_kv_rows * groups, int64_t n_groups);

    kv_cache & cache_;
    upkeep & upkeep_;
    int n_threads_;
};

} // namespace kvg
