#include "graph/rms_norm.h"

#include <ggml-backend.h>

#include "cpu/kernel.h"
#include "graph/own_node.h"
#include "graph/row.h"
#include "graph/thread_share.h"

namespace kvg {

namespace {

void run_norm(ggml_tensor * dst, int ith, int nth, void *) {
    const norm_kernel & kernel = kernels_here()[0]->norm;
    const ggml_tensor * x = dst->src[0];
    const auto * weight = static_cast<const float *>(dst->src[1]->data);
    const auto n = static_cast<uint32_t>(x->ne[0]);
    const auto n_heads = static_cast<uint32_t>(x->ne[1]);
    const float eps = eps_of(dst);
    share_out(n_heads * static_cast<uint32_t>(x->ne[2]), 1, PASSED_AT_ONCE / n, ith, nth, [&](uint32_t begin, uint32_t end) {
        for (uint32_t r = begin; r < end; ++r) {
            const auto * row = row_of<const float>(x, r % n_heads, r / n_heads);
            kernel.apply(row, weight, kernel.factor(row, n, eps), static_cast<float *>(dst->data) + size_t{r} * n, n);
        }
    });
}

} // namespace

bool is_normed_here(const ggml_tensor * x, const ggml_tensor * weight) {
    const auto has_floats = [](const ggml_tensor * t) { return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float); };
    return has_floats(x) && x->ne[3] == 1 && has_floats(weight) && ggml_nelements(weight) == x->ne[0] && weight->buffer &&
           ggml_backend_buffer_is_host(weight->buffer);
}

ggml_tensor * rms_norm(ggml_context * ctx, ggml_tensor * x, ggml_tensor * weight, float eps) {
    ggml_tensor * args[] = {x, weight};
    ggml_tensor * node =
        ggml_custom_4d(ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], x->ne[2], 1, args, 2, run_norm, GGML_N_TASKS_MAX, nullptr);
    set_own_word(node, eps);
    return node;
}

bool is_rms_norm(const ggml_tensor * node) { return function_of(node) == run_norm; }

float eps_of(const ggml_tensor * node) { return own_word<float>(node); }

} // namespace kvg
