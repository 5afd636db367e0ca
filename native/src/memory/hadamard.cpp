#include "memory/hadamard.h"

#include <algorithm>
#include <vector>

#include "cpu/kernel.h"
#include "error.h"
#include "host_memory.h"
#include "kvgraph.h"

namespace kvg {

hadamard::hadamard(ggml_backend_dev_t device, uint32_t size)
    : device_(device), size_(size), ctx_(new_ggml_context(ggml_tensor_overhead())),
      matrix_(ggml_new_tensor_2d(ctx_.get(), GGML_TYPE_F32, size, size)) {
    buffer_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device), 0));
    if (!buffer_) {
        fail(KVG_DEVICE, "out of host memory for a matrix");
    }
    matrix_->buffer = buffer_.get(); // says where it will be, and has no address
}

void hadamard::allocate() {
    matrix_->buffer = nullptr;
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx_.get(), ggml_backend_dev_buffer_type(device_)));
    if (!buffer_) {
        fail(KVG_DEVICE, "%s refused the memory for a matrix of %u x %u; use a smaller n_ctx", ggml_backend_dev_name(device_),
             size_, size_);
    }
    std::vector<float> rows(size_t{size_} * size_);
    for (uint32_t i = 0; i < size_; ++i) {
        rows[size_t{i} * size_ + i] = 1.0f;
    }
    apply(rows.data(), rows.size());
    ggml_backend_tensor_set(matrix_, rows.data(), 0, rows.size() * sizeof(float));
}

ggml_tensor * hadamard::apply(ggml_context * ctx, ggml_tensor * x) const {
    x = ggml_is_contiguous(x) ? x : ggml_cont(ctx, x); // V of one matrix with Q and K is a part of each of its rows
    ggml_tensor * mixed = ggml_mul_mat(ctx, matrix_, ggml_reshape_2d(ctx, x, size_, ggml_nelements(x) / size_));
    ggml_mul_mat_set_hint(mixed, GGML_HINT_SRC0_IS_HADAMARD); // backends have a fast transform, GPUs for 64 to 512
    return ggml_reshape(ctx, mixed, x);
}

void hadamard::apply(float * x, size_t n) const { kernels_here()[0]->rows.mix(x, n, size_); }

// The greatest power of two that divides n.
static uint32_t power_of_two_in(uint32_t n) { return n & (~n + 1); }

// Of V in K the matrices are K's.
hadamard_sizes choose_hadamard(const group_spec & spec, ggml_type type_k, ggml_type type_v) {
    return {ggml_is_quantized(type_k) ? power_of_two_in(spec.head_dim_k | spec.v_in_k) : 0,
            ggml_is_quantized(type_v) && spec.v_in_k == 0 ? std::min(power_of_two_in(spec.head_dim_v), 64u) : 0};
}

} // namespace kvg
