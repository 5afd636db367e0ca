// The cache of a context: all groups of cells. An operation on a sequence changes every group, or fails and changes none.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "memory/kv_group.h"
#include "model/hparams.h"

namespace kvg {

// How many cells the groups have.
struct cache_size {
    uint32_t n_ctx;            // of a group that keeps every position
    uint32_t n_batch;          // most tokens that come at once
    uint32_t n_seq_max;        //
    uint32_t checkpoint_cells; // of a window, beside what its sequences attend to
    bool swa_full;             // windows keep every position, too
    bool is_measured;          // the cache only measures memory; groups have a record of one cell

    uint32_t of(const group_spec & spec) const;
    // whether cells that their sequences have left behind are reused
    bool reuses(const group_spec & spec) const { return spec.window > 0 && !swa_full; }
};

class kv_cache {
public:
    // devices: of each layer. Like kv_group, this takes no device memory yet. error(KVG_DEVICE), with the size needed and the size free,
    // when a device has no room
    kv_cache(const hparams & h, const std::vector<ggml_backend_dev_t> & devices, const backends & backends,
             const cache_size & size, const cache_types & types);
    // Allocates K and V of every group. Call it once, and clear(true) before K and V are used. error(KVG_DEVICE)
    void allocate();

    std::deque<kv_group> & groups() { return groups_; }
    const std::deque<kv_group> & groups() const { return groups_; }
    // layer: its number in the model
    uint32_t group_index_of(uint32_t layer) const { return group_of_layer_[layer]; }
    const kv_group & group_of(uint32_t layer) const { return groups_[group_of_layer_[layer]]; }
    ggml_backend_dev_t device(uint32_t layer) const { return devices_[layer]; }
    uint32_t n_layer() const { return static_cast<uint32_t>(devices_.size()); }
    // Tokens that can be decoded: empty cells of groups without a window. Without such groups also cells that may be reused.
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

    // As in `cells`, in every group. error(KVG_INVALID_ARGUMENT) when a sequence would end where a window has lost what its next token
    // attends to
    void seq_rm(int64_t seq, int64_t p0, int64_t p1);
    void seq_cp(int64_t src, int64_t dst, int64_t p0, int64_t p1);
    void seq_keep(int64_t seq);
    // The lowest position from which on every group has all, and the highest; -1 when there are no cells. When a window has lost all
    // that the next token attends to, the first is beyond the second.
    int32_t seq_pos_min(int64_t seq) const;
    int32_t seq_pos_max(int64_t seq) const;
    // cells of the sequence in the group that has the most of them
    uint32_t seq_n_cells(int64_t seq) const;

    // error(KVG_INVALID_ARGUMENT) when a window has lost what a token at this position of the sequence attends to
    void require_seen(uint32_t seq, int32_t pos) const;
    seq_count count(int64_t seq, int64_t p0, int64_t p1) const;
    // One hold in every group that keeps every position, under one id, which is never used again. error(KVG_UNSUPPORTED) when there is
    // no such group
    hold_range hold(int64_t seq, int64_t p0, int64_t p1);
    void attach(int64_t hold, int64_t seq);
    void release(int64_t hold);

    // Calls kv_group::clear() for each group.
    void clear(bool data);
    // whether any group is broken()
    bool broken() const;

private:
    void require_return(uint32_t seq, int64_t p0, int64_t p1) const;
    bool ends_at(uint32_t seq, int64_t p0) const;
    void tighten_lost(int64_t seq, int64_t p0);
    bool release_in_all(int64_t hold);

    std::vector<ggml_backend_dev_t> devices_; // of each layer
    std::vector<uint32_t> group_of_layer_;
    int64_t next_hold_ = 1;
    std::deque<kv_group> groups_; // a deque, because other objects keep references to them
};

} // namespace kvg
