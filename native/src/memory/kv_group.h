// A group: layers with the same row sizes and the same window. It has the records of its cells, and K and V of each layer on its device.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ggml-cpp.h>

#include "backends.h"
#include "memory/cells.h"
#include "memory/hadamard.h"
#include "model/layer_spec.h"

namespace kvg {

// How K and V are stored.
struct cache_types {
    ggml_type k;
    ggml_type v;
    bool hadamard; // quantized rows are mixed by a Hadamard matrix
    // Cells from n_fresh on have rows of the old types, to which rows are converted when they age (memory/aging.h). Then all rows are
    // mixed as the old types want it. 0: all rows have the types above
    uint32_t n_fresh = 0;
    ggml_type old_k = GGML_TYPE_COUNT;
    ggml_type old_v = GGML_TYPE_COUNT;

    ggml_type last_k() const { return n_fresh > 0 ? old_k : k; } // what K ends as
    ggml_type last_v() const { return n_fresh > 0 ? old_v : v; }
};

// The part of a group on one device, for one reader: the layers whose cells are there, in one buffer, and what runs the group's update
// graphs there.
struct kv_part {
    ggml_backend_dev_t device;
    ggml_backend_dev_t
        reader; // where attention over these cells runs: there, or on a device that they are copied to (working_rows)
    ggml_backend_t backend;
    ggml_gallocr_ptr allocator;      // for update graphs; made when the first one needs it
    ggml_backend_buffer_type_t type; // of the buffer
    std::vector<uint32_t> layers;
    std::vector<ggml_tensor *> tensors;   // K of those layers, then V; then the same of old rows, if the group has them
    uint64_t bytes;                       // of the buffer
    std::unique_ptr<hadamard> hadamard_k; // mixes heads of K before they are quantized; nullptr: they are not mixed
    std::unique_ptr<hadamard> hadamard_v;
    ggml_context_ptr ctx;
    ggml_backend_buffer_ptr buffer;
};

// Of each layer of a model: the device of its cells, and the one whose attention reads them.
struct kv_homes {
    std::vector<ggml_backend_dev_t> cells;
    std::vector<ggml_backend_dev_t> readers;
    std::vector<ggml_backend_dev_t> states; // of its recurrent state, which that device updates; empty: all are in host memory
};

class kv_group {
public:
    // homes: of each layer of the model. n_rows: rows of the tensors, n_cells or more. This allocates the records of the cells, but
    // not K and V. The tensors already know their device, so devices can be asked what they support with them. reuses: as in `cells`
    kv_group(const group_spec & spec, const kv_homes & homes, const backends & backends, uint32_t n_cells, uint32_t n_rows,
             uint32_t n_seq_max, const cache_types & types, bool reuses);
    kv_group(const kv_group &) = delete;
    kv_group & operator=(const kv_group &) = delete;
    // Allocates K and V. Call it once, and clear(true) before K and V are used. error(KVG_DEVICE)
    void allocate();

    class cells & cells() { return cells_; }
    const class cells & cells() const { return cells_; }
    const group_spec & spec() const { return spec_; }
    const std::vector<uint32_t> & layers() const { return spec_.layers; }
    const cache_types & types() const { return types_; }
    // Rows of the tensors. There may be more rows than cells, so that an attended span can be padded; the additional rows stay zero.
    uint32_t n_rows() const { return n_rows_; }
    // By which matrices rows are mixed; 0: by none.
    hadamard_sizes mixed() const;
    uint64_t k_row_bytes() const { return ggml_row_size(types_.k, spec_.k_width()); }
    uint64_t v_row_bytes() const { return ggml_row_size(types_.v, spec_.v_width()); }
    uint64_t old_k_row_bytes() const { return ggml_row_size(types_.last_k(), spec_.k_width()); }
    uint64_t old_v_row_bytes() const { return ggml_row_size(types_.last_v(), spec_.v_width()); }
    // bytes of one cell: K and V of all layers of the group. Where rows age, of a fresh cell, and of an old one
    uint64_t cell_bytes() const { return spec_.layers.size() * (k_row_bytes() + v_row_bytes()); }
    uint64_t old_cell_bytes() const { return spec_.layers.size() * (old_k_row_bytes() + old_v_row_bytes()); }
    // bytes of all rows
    uint64_t bytes() const;
    // Whether rows age: cells before n_fresh() have them in k() and v(), the others in old_k() and old_v().
    bool ages() const { return types_.n_fresh > 0; }
    uint32_t n_fresh() const { return types_.n_fresh; }
    // bytes of K and V on a device; the same before allocate()
    uint64_t bytes_on(ggml_backend_dev_t device) const;
    // of these, those in host memory that another device copies from and to directly
    uint64_t pinned_bytes_on(ggml_backend_dev_t device) const;

    // One for each device, in the order of layers.
    std::vector<kv_part> & parts() { return parts_; }
    const std::vector<kv_part> & parts() const { return parts_; }
    // layer: the number in the model of one of the group's layers; so below
    const kv_part & part_of(uint32_t layer) const;
    // (n_head_kv * head_dim, n_rows), a row per cell; ggml's order: innermost first. v is nullptr where V is a part of K
    ggml_tensor * k(uint32_t layer) const { return k_[place_of(layer)]; }
    ggml_tensor * v(uint32_t layer) const { return v_[place_of(layer)]; }
    // The same for cells from n_fresh() on; nullptr where rows don't age
    ggml_tensor * old_k(uint32_t layer) const { return ages() ? old_k_[place_of(layer)] : nullptr; }
    ggml_tensor * old_v(uint32_t layer) const { return ages() ? old_v_[place_of(layer)] : nullptr; }
    // A view of cells [begin, begin + n), of fresh ones only where rows age, by heads: (head_dim, n_head_kv, n). rows: K or V of a layer, or
    // a graph node that writes to it. Only these two functions know the layout.
    ggml_tensor * k_heads(ggml_context * ctx, ggml_tensor * rows, uint32_t begin, uint32_t n) const;
    // rows: K, where V is a part of it
    ggml_tensor * v_heads(ggml_context * ctx, ggml_tensor * rows, uint32_t begin, uint32_t n) const;

    // (n_cells, n_head_kv, head_dim) floats of a layer's K or V
    void read(uint32_t layer, bool v, float * out) const;

    // Every cell becomes empty, and the rows of all cells touched since the last clear() become zero. Attention multiplies masked rows by
    // 0, and 0 times an arbitrary value can be NaN. data: all rows become zero.
    void clear(bool data);

    // A K-shift, a sort or a load that fails half way leaves rows that don't match the cells. Then the group is broken: nothing may use
    // its K and V until clear().
    bool broken() const { return broken_; }
    void set_broken() { broken_ = true; }
    void set_whole() { broken_ = false; }

    // update graphs computed so far
    int64_t n_graphs() const { return n_graphs_; }
    void count_graph() { ++n_graphs_; }

private:
    size_t place_of(uint32_t layer) const;
    void create(kv_part & part);
    void create_rows(kv_part & part, bool old);
    void zero_rows(const kv_part & part, uint32_t n);

    const group_spec spec_;
    cache_types types_;
    uint32_t n_rows_;
    class cells cells_;
    bool broken_ = false;
    int64_t n_graphs_ = 0;
    std::vector<ggml_tensor *> k_; // in the order of the group's layers
    std::vector<ggml_tensor *> v_;
    std::vector<ggml_tensor *> old_k_;
    std::vector<ggml_tensor *> old_v_;
    std::vector<kv_part> parts_;
};

// What n rows take in a layer of a group, fresh ones first where rows age; UINT64_MAX: more than that. precondition: n_fresh <= n_rows
uint64_t layer_bytes(const group_spec & spec, const cache_types & types, uint64_t n_rows);

// Marks the group as broken() while rows are changed in place. Without done(), for example after an exception, it stays broken.
class unfinished_rows {
public:
    explicit unfinished_rows(kv_group & group) : group_(group) { group.set_broken(); }
    void done() { group_.set_whole(); }

private:
    kv_group & group_;
};

} // namespace kvg
