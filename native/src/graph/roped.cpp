#include "graph/roped.h"

#include <algorithm>
#include <cstring>

#include "cpu/kernel.h"
#include "graph/row.h"
#include "graph/thread_share.h"
#include "model/rope.h"

namespace kvg {

namespace {

constexpr uint32_t AS_NUMBERS = 32; // numbers that are read and written take as long as a cosine

void run_table(ggml_tensor * dst, int ith, int nth, void * data) {
    const auto & params = *static_cast<const rope_params *>(data);
    const auto * positions = static_cast<const int32_t *>(dst->src[0]->data);
    const auto * factors = dst->src[1] ? static_cast<const float *>(dst->src[1]->data) : nullptr;
    const auto n = static_cast<uint32_t>(dst->ne[0]);
    share_out(static_cast<uint32_t>(dst->ne[1]), 1, PASSED_AT_ONCE / (AS_NUMBERS * n), ith, nth,
              [&](uint32_t begin, uint32_t end) {
                  rope_rows(positions + begin, end - begin, factors, params, row_of<float>(dst, begin));
              });
}

void run_roped(ggml_tensor * dst, int ith, int nth, void * data) {
    const auto & params = *static_cast<const rope_params *>(data);
    const ggml_tensor * heads = dst->src[0];
    const ggml_tensor * table = dst->src[1];
    const row_kernel & kernel = kernels_here()[0]->rows;
    const auto head_dim = static_cast<uint32_t>(dst->ne[0]);
    const auto n_heads = static_cast<uint32_t>(dst->ne[1]);
    const head_rotation how = {head_dim, static_cast<uint32_t>(params.n_rot) / 2, params.mode == GGML_ROPE_TYPE_NEOX,
                               static_cast<uint32_t>(params.offset)};
    const uint32_t n = head_dim * n_heads;
    share_out(static_cast<uint32_t>(dst->ne[2]), 1, PASSED_AT_ONCE / n, ith, nth, [&](uint32_t begin, uint32_t end) {
        for (uint32_t t = begin; t < end; ++t) {
            float * to = static_cast<float *>(dst->data) + size_t{t} * n;
            for (uint32_t h = 0; h < n_heads; ++h) {
                memcpy(to + size_t{h} * head_dim, row_of<const float>(heads, h, t), head_dim * sizeof(float));
            }
            kernel.rotate(to, n_heads, how, row_of<const float>(table, t));
        }
    });
}

} // namespace

bool is_roped_here(const ggml_tensor * heads, const rope_params & params) {
    return heads->type == GGML_TYPE_F32 && heads->nb[0] == sizeof(float) && heads->ne[3] == 1 &&
           (params.mode == GGML_ROPE_TYPE_NORMAL || params.mode == GGML_ROPE_TYPE_NEOX) && params.n_rot % 2 == 0 &&
           params.offset + params.n_rot <= heads->ne[0];
}

ggml_tensor * rope_table(ggml_context * ctx, ggml_tensor * positions, ggml_tensor * freq_factors, const rope_params & params) {
    ggml_tensor * args[] = {positions, freq_factors};
    return ggml_custom_4d(ctx, GGML_TYPE_F32, params.n_rot, positions->ne[0], 1, 1, args, freq_factors ? 2 : 1, run_table,
                          GGML_N_TASKS_MAX, const_cast<rope_params *>(&params));
}

ggml_tensor * roped(ggml_context * ctx, ggml_tensor * heads, ggml_tensor * table, const rope_params & params) {
    ggml_tensor * args[] = {heads, table};
    return ggml_custom_4d(ctx, GGML_TYPE_F32, heads->ne[0], heads->ne[1], heads->ne[2], 1, args, 2, run_roped, GGML_N_TASKS_MAX,
                          const_cast<rope_params *>(&params));
}

} // namespace kvg
