// All groups of a context: what is done to sequences is done in every group, or in none.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "memory/kv_group.h"
#include "model/hparams.h"

namespace kvg {

class kv_cache {
public:
    // devices: of each layer. Nothing is allocated yet, as in kv_group; is_measured: that is all that it is for, and its cells are one.
    // error(KVG_DEVICE), with the sizes asked and free, when a device has no room
    kv_cache(const hparams & h, const std::vector<ggml_backend_dev_t> & devices, const backends & backends, uint32_t n_cells,
             uint32_t n_seq_max, const cache_types & types, bool is_measured);
    // Memory for K and V of every group; once, and clear(true) must follow before they are used. error(KVG_DEVICE)
    void allocate();

    std::deque<kv_group> & groups() { return groups_; }
    const std::deque<kv_group> & groups() const { return groups_; }
    // of a layer of the model
    uint32_t group_index_of(uint32_t layer) const { return group_of_layer_[layer]; }
    const kv_group & group_of(uint32_t layer) const { return groups_[group_of_layer_[layer]]; }
    ggml_backend_dev_t device(uint32_t layer) const { return devices_[layer]; }
    uint32_t n_layer() const { return static_cast<uint32_t>(devices_.size()); }
    // empty cells, in the group that has the fewest
    uint32_t n_free() const;
    uint32_t n_seq_max() const { return groups_.front().cells().n_seq_max(); }
    const cache_types & types() const { return groups_.front().types(); }
    // rows of the group that has the most
    uint32_t max_rows() const;
    uint64_t bytes() const;
    // that K and V take on a device, or will
    uint64_t bytes_on(ggml_backend_dev_t device) const;
    uint32_t layers_on(ggml_backend_dev_t device) const;
    // of one cell in each group
    uint64_t cell_bytes() const;
    // small graphs computed so far
    int64_t n_graphs() const;

    // As in `cells`, in every group.
    void seq_rm(int64_t seq, int64_t p0, int64_t p1);
    void seq_cp(int64_t src, int64_t dst, int64_t p0, int64_t p1);
    void seq_keep(int64_t seq);
    // What every group has: the greatest of their lowest positions, and the lowest of their highest; -1 when one has none.
    int32_t seq_pos_min(int64_t seq) const;
    int32_t seq_pos_max(int64_t seq) const;
    // cells of the sequence, in the group that has the most
    uint32_t seq_n_cells(int64_t seq) const;

    seq_count count(int64_t seq, int64_t p0, int64_t p1) const;
    // One hold in every group, under one id, which is never used again.
    hold_range hold(int64_t seq, int64_t p0, int64_t p1);
    void attach(int64_t hold, int64_t seq);
    void release(int64_t hold);

    // kv_group::clear of each.
    void clear(bool data);
    // whether any group is
    bool broken() const;

private:
    std::vector<ggml_backend_dev_t> devices_; // of each layer
    std::vector<uint32_t> group_of_layer_;
    int64_t next_hold_ = 1;
    std::deque<kv_group> groups_; // which others refer to
};

} // namespace kvg
