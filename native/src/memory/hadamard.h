// Mixes the dimensions of heads by a Walsh-Hadamard matrix before rows are quantized. A large value is then spread over all dimensions,
// and costs the other values less of their precision (QuIP, arXiv:2307.13304; QuaRot, arXiv:2404.00456; llama.cpp #21038).
//
// The matrix is symmetric, orthonormal and its own inverse. So a mixed query and a mixed K have the same product as before, and the
// result of attention with a mixed V is mixed once more, which undoes it.
#pragma once

#include <cstddef>
#include <cstdint>

#include <ggml-cpp.h>

#include "model/layer_spec.h"

namespace kvg {

class hadamard {
public:
    // size: a power of two; each piece of so many dimensions of a head is mixed. Takes no memory yet, but the device can already be asked
    // what it supports with this matrix. error(KVG_DEVICE)
    hadamard(ggml_backend_dev_t device, uint32_t size);
    // Allocates the matrix and writes its values. Call it once. error(KVG_DEVICE)
    void allocate();

    uint32_t size() const { return size_; }
    // x mixed, of the same shape. precondition: F32, contiguous, ne[0] a multiple of size
    ggml_tensor * apply(ggml_context * ctx, ggml_tensor * x) const;
    // The same in host memory, in place. precondition: n is a multiple of size
    void apply(float * x, size_t n) const;

private:
    ggml_backend_dev_t device_;
    uint32_t size_;
    ggml_context_ptr ctx_;
    ggml_backend_buffer_ptr buffer_;
    ggml_tensor * matrix_; // F32 (size, size)
};

// The sizes of the matrices for K and V; 0: not mixed.
struct hadamard_sizes {
    uint32_t k;
    uint32_t v;
};

// Only quantized types are mixed. For K the size is the greatest power of two that divides head_dim_k; for V it is at most 64. Saved
// states rely on these sizes. llama.cpp has the same sizes for heads of a multiple of 64, and does not mix other heads.
hadamard_sizes choose_hadamard(const group_spec & spec, ggml_type type_k, ggml_type type_v);

} // namespace kvg
