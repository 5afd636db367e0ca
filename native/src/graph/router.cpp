#include "graph/router.h"

#include <algorithm>
#include <cmath>

#include <ggml-backend.h>

#include "cpu/kernel.h"
#include "graph/own_node.h"
#include "graph/row.h"
#include "graph/thread_share.h"

namespace kvg {

namespace {

void run_expert_scores(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * weight = dst->src[0];
    const ggml_tensor * x = dst->src[1];
    const ggml_tensor * bias = dst->src[2];
    const route_job job = {static_cast<const float *>(weight->data), bias ? static_cast<const float *>(bias->data) : nullptr,
                           static_cast<const float *>(x->data),      x->nb[1] / sizeof(float),
                           static_cast<float *>(dst->data),          static_cast<uint32_t>(x->ne[0]),
                           static_cast<uint32_t>(dst->ne[0]),        static_cast<uint32_t>(x->ne[1])};
    constexpr uint64_t AS_BYTES = 8; // products of bytes take as long as one of floats
    const uint64_t of_output = AS_BYTES * job.n_in * job.n_rows;
    const auto least = static_cast<uint32_t>(MULTIPLIED_AT_ONCE / of_output + 1);
    share_out(job.n_out, 1, least, ith, nth,
              [&](uint32_t begin, uint32_t end) { kernels_here()[0]->feed_forward.route(job, begin, end); });
}

// For each token: visit(its scores, their number, its row of dst).
template <class T, class F> void each_token(ggml_tensor * dst, int ith, int nth, F visit) {
    const ggml_tensor * scores = dst->src[0];
    const auto n = static_cast<uint32_t>(scores->ne[0]);
    share_out(static_cast<uint32_t>(dst->ne[1]), 1, PASSED_AT_ONCE / n, ith, nth, [&](uint32_t begin, uint32_t end) {
        for (uint32_t t = begin; t < end; ++t) {
            visit(row_of<const float>(scores, t), n, row_of<T>(dst, t), t);
        }
    });
}

// NaN, too, leave as many different experts.
void run_best(ggml_tensor * dst, int ith, int nth, void *) {
    const auto n_used = static_cast<uint32_t>(dst->ne[0]);
    each_token<int32_t>(dst, ith, nth, [&](const float * scores, uint32_t n, int32_t * best, uint32_t) {
        for (uint32_t e = 0; e < n; ++e) {
            if (e >= n_used && !(scores[e] > scores[best[n_used - 1]])) {
                continue;
            }
            uint32_t place = std::min(e, n_used - 1);
            for (; place > 0 && scores[e] > scores[best[place - 1]]; --place) {
                best[place] = best[place - 1];
            }
            best[place] = static_cast<int32_t>(e);
        }
    });
}

void run_weights(ggml_tensor * dst, int ith, int nth, void * data) {
    const auto & spec = *static_cast<const feed_forward_spec *>(data);
    const ggml_tensor * experts = dst->src[1];
    const auto n_used = static_cast<uint32_t>(dst->ne[0]);
    each_token<float>(dst, ith, nth, [&](const float * scores, uint32_t n, float * weights, uint32_t token) {
        const auto * chosen = row_of<const int32_t>(experts, token);
        for (uint32_t i = 0; i < n_used; ++i) {
            weights[i] = scores[chosen[i]];
        }
        const bool of_all = spec.gating == gating_kind::softmax;
        const softmax_parts parts = kernels_here()[0]->attend.softmax(of_all ? scores : weights, of_all ? n : n_used);
        float sum = 0.0f;
        for (uint32_t i = 0; i < n_used; ++i) {
            weights[i] = std::exp(weights[i] - parts.greatest) / parts.sum;
            sum += weights[i];
        }
        const bool divides = of_all && spec.sums_to_1;
        const float scale = spec.expert_scale > 0.0f ? spec.expert_scale : 1.0f;
        for (uint32_t i = 0; i < n_used; ++i) {
            weights[i] = (divides ? weights[i] / std::max(sum, SMALLEST_SUM_OF_WEIGHTS) : weights[i]) * scale;
        }
    });
}

ggml_tensor * custom(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1, ggml_tensor ** args, int n_args,
                     ggml_custom_op_t run, const void * data = nullptr) {
    return ggml_custom_4d(ctx, type, ne0, ne1, 1, 1, args, n_args, run, GGML_N_TASKS_MAX, const_cast<void *>(data));
}

} // namespace

bool is_router_here(const ggml_tensor * weight, const ggml_tensor * x) {
    constexpr int64_t WIDEST = 16; // vectors have at most so many floats
    return weight->type == GGML_TYPE_F32 && ggml_backend_buffer_is_host(weight->buffer) && ggml_is_matrix(weight) &&
           ggml_is_contiguous(weight) && weight->ne[0] % WIDEST == 0 && ggml_is_matrix(x) && x->type == GGML_TYPE_F32 &&
           x->nb[0] == sizeof(float);
}

ggml_tensor * expert_scores(ggml_context * ctx, ggml_tensor * weight, ggml_tensor * bias, ggml_tensor * x) {
    ggml_tensor * args[] = {weight, x, bias};
    return custom(ctx, GGML_TYPE_F32, weight->ne[1], x->ne[1], args, bias ? 3 : 2, run_expert_scores);
}

bool is_expert_scores(const ggml_tensor * node) { return function_of(node) == run_expert_scores; }

ggml_tensor * best_experts(ggml_context * ctx, ggml_tensor * scores, uint32_t n_used) {
    return custom(ctx, GGML_TYPE_I32, n_used, scores->ne[1], &scores, 1, run_best);
}

ggml_tensor * weights_of_experts(ggml_context * ctx, ggml_tensor * scores, ggml_tensor * experts,
                                 const feed_forward_spec & spec) {
    ggml_tensor * args[] = {scores, experts};
    return custom(ctx, GGML_TYPE_F32, experts->ne[0], experts->ne[1], args, 2, run_weights, &spec);
}

} // namespace kvg
