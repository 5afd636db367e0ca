// K and V of every layer on the device, with the cells that say what is in them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ggml-cpp.h>

#include "cache/cells.h"
#include "cache/hadamard.h"
#include "model/hparams.h"

namespace kvg {

class kv_cache {
public:
    // error(KVG_DEVICE), with the sizes asked and free, when the device has no room
    kv_cache(ggml_backend_dev_t device, const hparams & h, uint32_t n_cells, uint32_t n_seq_max, ggml_type type_k,
             ggml_type type_v, const hadamard_sizes & rotated);

    class cells & cells() { return cells_; }
    const class cells & cells() const { return cells_; }
    uint32_t n_layer() const { return static_cast<uint32_t>(k_.size()); }
    uint32_t n_head_kv() const { return n_head_kv_; }
    uint32_t head_dim() const { return head_dim_; }
    ggml_type type_k() const { return k_.front()->type; }
    ggml_type type_v() const { return v_.front()->type; }
    // How rows of K and V were rotated before they were quantized; nullptr: not at all.
    const hadamard * hadamard_k() const { return hadamard_k_.get(); }
    const hadamard * hadamard_v() const { return hadamard_v_.get(); }
    // Rows of the tensors: n_cells rounded up to 256, so that an attended span may be padded. The rows beyond stay zero.
    uint32_t n_rows() const { return n_rows_; }
    uint64_t bytes() const;
    // of one cell, K and V of all layers
    uint64_t cell_bytes() const;

    // (n_head_kv * head_dim, n_rows), a row per cell; ggml's order: innermost first
    ggml_tensor * k(uint32_t layer) const { return k_[layer]; }
    ggml_tensor * v(uint32_t layer) const { return v_[layer]; }
    // K of every layer, then V.
    const std::vector<ggml_tensor *> & tensors() const { return tensors_; }
    // The layout, in one place: cells [begin, begin + n) of K or V (or of a node that wrote to one) by heads,
    // (head_dim, n_head_kv, n).
    ggml_tensor * heads(ggml_context * ctx, ggml_tensor * rows, uint32_t begin, uint32_t n) const;

    // (n_cells, n_head_kv, head_dim) floats of a layer's K or V
    void read(uint32_t layer, bool v, float * out) const;

    // Raw rows of cells: for each layer K then V, a row per cell, in the order of `cells`. n * cell_bytes() bytes.
    void read_rows(const std::vector<uint32_t> & cells, uint8_t * out, int n_threads) const;
    void write_rows(const std::vector<uint32_t> & cells, const uint8_t * data, int n_threads);

    // Every cell becomes empty, and its row zero; with `data` even rows that no cell has used since the last time.
    void clear(bool data);

    // A K-shift, a sort or a load that fails half way leaves rows that are not what the cells say: nothing may use them until clear().
    bool broken() const { return broken_; }
    void set_broken() { broken_ = true; }

private:
    void zero_rows(uint32_t n);
    template <class F> void each_run(const std::vector<uint32_t> & cells, int n_threads, F visit) const;

    uint32_t n_rows_; // first: its initialiser refuses what can't fit, before anything is allocated
    class cells cells_;
    uint32_t n_head_kv_;
    uint32_t head_dim_;
    bool broken_ = false;
    std::unique_ptr<hadamard> hadamard_k_;
    std::unique_ptr<hadamard> hadamard_v_;
    ggml_context_ptr ctx_;
    ggml_backend_buffer_ptr buffer_;
    std::vector<ggml_tensor *> k_;
    std::vector<ggml_tensor *> v_;
    std::vector<ggml_tensor *> tensors_;
};

} // namespace kvg
