#include "graph/product.h"

#include <algorithm>
#include <cstring>

#include <ggml-backend.h>

#include "cpu/products.h"
#include "graph/thread_share.h"

namespace kvg {

namespace {

void run_round(ggml_tensor * dst, int ith, int nth, void * form) {
    const auto & how = *static_cast<const row_form *>(form);
    const ggml_tensor * x = dst->src[0];
    const auto n = static_cast<uint32_t>(x->ne[0]);
    share_out(static_cast<uint32_t>(x->ne[1]), 1, PASSED_AT_ONCE / n, ith, nth, [&](uint32_t begin, uint32_t end) {
        for (uint32_t r = begin; r < end; ++r) {
            const auto * from = reinterpret_cast<const float *>(static_cast<const char *>(x->data) + r * x->nb[1]);
            how.round(from, static_cast<uint8_t *>(dst->data) + r * dst->nb[1], n);
        }
    });
}

void run_multiply(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * weight = dst->src[0];
    const product_job job = {static_cast<const uint8_t *>(weight->data),
                             weight->nb[1],
                             static_cast<const uint8_t *>(dst->src[1]->data),
                             static_cast<float *>(dst->data),
                             static_cast<uint32_t>(weight->ne[0]),
                             static_cast<uint32_t>(weight->ne[1]),
                             static_cast<uint32_t>(dst->ne[1])};
    const product_kernel & kernel = *product_kernel_for(weight->type);
    const uint64_t of_tile = uint64_t{PRODUCT_TILE} * job.n_in * job.n_rows;
    const auto min_tiles = static_cast<uint32_t>((MULTIPLIED_AT_ONCE + of_tile - 1) / of_tile);
    share_out((job.n_out + PRODUCT_TILE - 1) / PRODUCT_TILE, 1, min_tiles, ith, nth,
              [&](uint32_t begin, uint32_t end) { kernel.run(job, begin, end); });
}

} // namespace

const row_form * form_of(const ggml_tensor * weight, const ggml_tensor * x) {
    const product_kernel * kernel = product_kernel_for(weight->type);
    const bool runs = kernel && ggml_backend_buffer_is_host(weight->buffer) && ggml_is_matrix(weight) && ggml_is_matrix(x) &&
                      x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float);
    return runs ? &kernel->form : nullptr;
}

ggml_tensor * rounded(ggml_context * ctx, ggml_tensor * x, const row_form & form) {
    ggml_tensor * args[] = {x};
    const auto n_bytes = static_cast<int64_t>(form.bytes(static_cast<uint32_t>(x->ne[0])));
    return ggml_custom_4d(ctx, GGML_TYPE_I8, n_bytes, x->ne[1], 1, 1, args, 1, run_round, GGML_N_TASKS_MAX,
                          const_cast<row_form *>(&form));
}

bool is_multiply(const ggml_tensor * node) {
    ggml_custom_op_t run = nullptr; // the first of ggml's parameters of such an operation
    memcpy(&run, node->op_params, sizeof(run));
    return node->op == GGML_OP_CUSTOM && run == run_multiply;
}

ggml_tensor * multiply(ggml_context * ctx, ggml_tensor * weight, ggml_tensor * rows) {
    ggml_tensor * args[] = {weight, rows};
    return ggml_custom_4d(ctx, GGML_TYPE_F32, weight->ne[1], rows->ne[1], 1, 1, args, 2, run_multiply, GGML_N_TASKS_MAX,
                          nullptr);
}

} // namespace kvg
