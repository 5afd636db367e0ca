// The cache of a context: all groups of cells. An operation on a sequence changes every group, or fails and changes none.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "memory/kv_group.h"
#include "model/hparams.h"

namespace kvg {

class kv_cache {
public:
    // devices: of each layer. Like kv_group, this takes no device memory yet. is_measured: the cache is only used to measure how much
    // memory a context takes; then it has a record of one cell only.
    // error(KVG_DEVICE), with the size needed and the size free, when a device has no room
    kv_cache(const hparams & h, const std::vector<ggml_backend_dev_t> & devices, const backends & backends, uint32_t n_cells,
             uint32_t n_seq_max, const cache_types & types, bool is_measured);
    // Allocates K and V of every group. Call it once, and clear(true) before K and V are used. error(KVG_DEVICE)
    void allocate();

    std::deque<kv_group> & groups() { return groups_; }
    const std::deque<kv_group> & groups() const { return groups_; }
    // layer: its number in the model
    uint32_t group_index_of(uint32_t layer) const { return group_of_layer_[layer]; }
    const kv_group & group_of(uint32_t layer) const { return groups_[group_of_layer_[layer]]; }
    ggml_backend_dev_t device(uint32_t layer) const { return devices_[layer]; }
    uint32_t n_layer() const { return static_cast<uint32_t>(devices_.size()); }
    // empty cells in the group that has the fewest of them
    uint32_t n_free() const;
    uint32_t n_seq_max() const { return groups_.front().cells().n_seq_max(); }
    const cache_types & types() const { return groups_.front().types(); }
    // rows of the group that has the most
    uint32_t max_rows() const;
    uint64_t bytes() const;
    // bytes of K and V on a device; the same before allocate()
    uint64_t bytes_on(ggml_backend_dev_t device) const;
    uint32_t layers_on(ggml_backend_dev_t device) const;
    // bytes of K and V of one cell in every group together
    uint64_t cell_bytes() const;
    // graphs for K-shift, defrag and copies that were computed so far
    int64_t n_graphs() const;

    // As in `cells`, but in every group.
    void seq_rm(int64_t seq, int64_t p0, int64_t p1);
    void seq_cp(int64_t src, int64_t dst, int64_t p0, int64_t p1);
    void seq_keep(int64_t seq);
    // The range of positions that every group has: the greatest of the groups' lowest positions, and the lowest of their highest
    // positions. -1 when the sequence has no cells in a group.
    int32_t seq_pos_min(int64_t seq) const;
    int32_t seq_pos_max(int64_t seq) const;
    // cells of the sequence in the group that has the most of them
    uint32_t seq_n_cells(int64_t seq) const;

    seq_count count(int64_t seq, int64_t p0, int64_t p1) const;
    // Makes a hold in every group, under the same id. The id is never used again.
    hold_range hold(int64_t seq, int64_t p0, int64_t p1);
    void attach(int64_t hold, int64_t seq);
    void release(int64_t hold);

    // Calls kv_group::clear() for each group.
    void clear(bool data);
    // whether any group is broken()
    bool broken() const;

private:
    std::vector<ggml_backend_dev_t> devices_; // of each layer
    std::vector<uint32_t> group_of_layer_;
    int64_t next_hold_ = 1;
    std::deque<kv_group> groups_; // a deque, because other objects keep references to them
};

} // namespace kvg
