// A Walsh-Hadamard rotation of heads, for rows that are quantized: it spreads a large value over all dimensions, where it costs the
// others less of their precision (QuIP, arXiv:2307.13304; QuaRot, arXiv:2404.00456; llama.cpp #21038). Symmetric, orthonormal,
// its own inverse: a query and K both rotated have the same product, and what comes of a rotated V is rotated back.
#pragma once

#include <cstddef>
#include <cstdint>

#include <ggml-cpp.h>

namespace kvg {

class hadamard {
public:
    // size: a power of two; each piece of a head of so many dimensions is rotated. Nothing is allocated yet: the matrix knows where it
    // will be, and the device can be asked about it. error(KVG_DEVICE)
    hadamard(ggml_backend_dev_t device, uint32_t size);
    // Memory for the matrix, and its values; once. error(KVG_DEVICE)
    void allocate();

    uint32_t size() const { return size_; }
    // x rotated, of the same shape. precondition: F32, contiguous, ne[0] a multiple of size
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

// Sizes of the rotations of K and V, 0 for none.
struct hadamard_sizes {
    uint32_t k;
    uint32_t v;
};

// Only quantized types are rotated; K by the greatest power of two that divides its heads, V by at most 64. Saved states rely on that.
// llama.cpp has the same sizes for heads of a multiple of 64, and rotates no others.
hadamard_sizes choose_hadamard(uint32_t head_dim_k, uint32_t head_dim_v, ggml_type type_k, ggml_type type_v);

} // namespace kvg
