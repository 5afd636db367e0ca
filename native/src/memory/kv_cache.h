// K and V of every layer, each on its device, with the cells that say what is in them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ggml-cpp.h>

#include "memory/cells.h"
#include "memory/hadamard.h"
#include "model/hparams.h"

namespace kvg {

// The layers whose cells lie on one device, in one buffer.
struct kv_part {
    ggml_backend_dev_t device;
    std::vector<uint32_t> layers;
    std::vector<ggml_tensor *> tensors;   // K of those layers, then V
    uint64_t bytes;                       // that the buffer takes
    std::unique_ptr<hadamard> hadamard_k; // how rows of K were rotated before they were quantized; nullptr: not at all
    std::unique_ptr<hadamard> hadamard_v;
    ggml_context_ptr ctx;
    ggml_backend_buffer_ptr buffer;
};

// Rows of these cells between a tensor of the cache, wherever it is, and host memory, where they lie one after the other.
void read_rows_of(const ggml_tensor * rows, const std::vector<uint32_t> & cells, uint8_t * out);
void write_rows_of(ggml_tensor * rows, const std::vector<uint32_t> & cells, const uint8_t * data);

class kv_cache {
public:
    // devices: of each layer. Nothing is allocated yet but what the cells take: the tensors know where they will be, and devices can
    // be asked about them; is_measured: that is all that it is for, and it has no cells. error(KVG_DEVICE), with the sizes asked and
    // free, when a device has no room
    kv_cache(const std::vector<ggml_backend_dev_t> & devices, const hparams & h, uint32_t n_cells, uint32_t n_seq_max,
             ggml_type type_k, ggml_type type_v, const hadamard_sizes & rotated, bool is_measured);
    // Memory for K and V; once, and clear(true) must follow before they are used. error(KVG_DEVICE)
    void allocate();

    class cells & cells() { return cells_; }
    const class cells & cells() const { return cells_; }
    uint32_t n_layer() const { return static_cast<uint32_t>(k_.size()); }
    uint32_t n_head_kv() const { return n_head_kv_; }
    uint32_t head_dim() const { return head_dim_; }
    ggml_type type_k() const { return k_.front()->type; }
    ggml_type type_v() const { return v_.front()->type; }
    // On the device of the layer's cells, as in its part.
    const hadamard * hadamard_k(uint32_t layer) const { return part_of(layer).hadamard_k.get(); }
    const hadamard * hadamard_v(uint32_t layer) const { return part_of(layer).hadamard_v.get(); }
    // Rows of the tensors: n_cells rounded up to 256, so that an attended span may be padded. The rows beyond stay zero.
    uint32_t n_rows() const { return n_rows_; }
    uint64_t bytes() const;
    // that K and V take on a device, or will
    uint64_t bytes_on(ggml_backend_dev_t device) const;
    // of one cell, K and V of all layers
    uint64_t cell_bytes() const;

    // (n_head_kv * head_dim, n_rows), a row per cell; ggml's order: innermost first
    ggml_tensor * k(uint32_t layer) const { return k_[layer]; }
    ggml_tensor * v(uint32_t layer) const { return v_[layer]; }
    // One for each device, in the order of layers.
    const std::vector<kv_part> & parts() const { return parts_; }
    // of the layer's cells
    ggml_backend_dev_t device(uint32_t layer) const { return devices_[layer]; }
    // The layout, in one place: cells [begin, begin + n) of K or V (or of a node that wrote to one) by heads,
    // (head_dim, n_head_kv, n).
    ggml_tensor * heads(ggml_context * ctx, ggml_tensor * rows, uint32_t begin, uint32_t n) const;

    // (n_cells, n_head_kv, head_dim) floats of a layer's K or V
    void read(uint32_t layer, bool v, float * out) const;

    // Raw rows of cells: for each layer K then V, a row per cell, in the order of `cells`. n * cell_bytes() bytes.
    void read_rows(const std::vector<uint32_t> & cells, uint8_t * out, int n_threads) const;
    void write_rows(const std::vector<uint32_t> & cells, const uint8_t * data, int n_threads);

    // Every cell becomes empty, and its row zero: attention multiplies masked rows by 0, and 0 times garbage can be NaN. With `data` even
    // rows that no cell has used since the last time.
    void clear(bool data);

    // A K-shift, a sort or a load that fails half way leaves rows that are not what the cells say: nothing may use them until clear().
    bool broken() const { return broken_; }
    void set_broken() { broken_ = true; }
    void set_whole() { broken_ = false; }

private:
    const kv_part & part_of(uint32_t layer) const;
    void zero_rows(const kv_part & part, uint32_t n);
    template <class F> void each_tensor(size_t n_rows, int n_threads, bool from_end, F visit) const;

    uint32_t n_rows_;
    class cells cells_;
    uint32_t n_head_kv_;
    uint32_t head_dim_;
    bool broken_ = false;
    std::vector<ggml_backend_dev_t> devices_; // of each layer
    std::vector<ggml_tensor *> k_;
    std::vector<ggml_tensor *> v_;
    std::vector<kv_part> parts_;
};

// Around what changes rows in place: a cache that is left in the middle of it is broken().
class unfinished_rows {
public:
    explicit unfinished_rows(kv_cache & cache) : cache_(cache) { cache.set_broken(); }
    void done() { cache_.set_whole(); }

private:
    kv_cache & cache_;
};

} // namespace kvg
