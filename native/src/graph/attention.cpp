#include "graph/attention.h"

#include "device.h"
#include "host_memory.h"

namespace kvg {

// What attention takes, as ggml's operations want it.
struct attention_inputs {
    ggml_tensor * q; // (head_dim_k, n_tokens, n_head)
    ggml_tensor * k; // (head_dim_k, n_kv, n_head_kv)
    ggml_tensor * v; // (head_dim_v, n_kv, n_head_kv)
    ggml_tensor * mask;
    ggml_tensor * sinks; // or nullptr
};

static ggml_tensor * flash(ggml_context * ctx, const layer_attention & how, const attention_inputs & in) {
    ggml_tensor * out = ggml_flash_attn_ext(ctx, in.q, in.k, in.v, in.mask, how.scale, how.max_bias, how.soft_cap);
    ggml_flash_attn_ext_add_sinks(out, in.sinks);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    return out; // (head_dim_v, n_head, n_tokens)
}

static ggml_tensor * soften(ggml_context * ctx, const layer_attention & how, ggml_tensor * scores,
                            const attention_inputs & in) {
    float scale = how.scale;
    if (how.soft_cap != 0.0f) {
        scores = ggml_tanh(ctx, ggml_scale(ctx, scores, how.scale / how.soft_cap));
        scale = how.soft_cap;
    }
    scores = ggml_soft_max_ext(ctx, scores, in.mask, scale, how.max_bias);
    ggml_soft_max_add_sinks(scores, in.sinks);
    return scores;
}

// The query heads that share a KV head are folded into rows, so that each K and V row is read once.
static ggml_tensor * plain(ggml_context * ctx, const layer_attention & how, const attention_inputs & in) {
    ggml_tensor * q = in.q;
    ggml_tensor * k = in.k;
    const int64_t n_tokens = q->ne[1];
    const int64_t n_head = q->ne[2];
    const int64_t n_kv = k->ne[1];
    const int64_t n_head_kv = k->ne[2];
    const int64_t n_rows = n_tokens * (n_head / n_head_kv);

    ggml_tensor * folded = ggml_reshape_3d(ctx, n_tokens == 1 ? q : ggml_cont(ctx, q), q->ne[0], n_rows, n_head_kv);
    ggml_tensor * kq = ggml_mul_mat(ctx, k, folded); // (n_kv, n_rows, n_head_kv)
    ggml_prec_set_acc(kq, GGML_PREC_F32);
    kq = soften(ctx, how, ggml_reshape_3d(ctx, kq, n_kv, n_tokens, n_head), in);
    kq = ggml_reshape_3d(ctx, kq, n_kv, n_rows, n_head_kv);
    ggml_tensor * v = ggml_cont(ctx, ggml_permute(ctx, in.v, 1, 0, 2, 3)); // (n_kv, head_dim_v, n_head_kv)
    ggml_tensor * out = ggml_mul_mat(ctx, v, kq);                          // (head_dim_v, n_rows, n_head_kv)
    out = ggml_reshape_3d(ctx, out, out->ne[0], n_tokens, n_head);
    return ggml_cont(ctx, ggml_permute(ctx, out, 0, 2, 1, 3));
}

ggml_tensor * attention(ggml_context * ctx, const layer_attention & how, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
                        ggml_tensor * mask, ggml_tensor * sinks) {
    const int64_t width = v->ne[0] * q->ne[1];
    const int64_t n_tokens = q->ne[2];
    if (how.kind == attention_kind::attend) {
        return ggml_reshape_2d(ctx, how.op->node(ctx, q, k, v, mask, sinks), width, n_tokens);
    }
    const attention_inputs in = {ggml_permute(ctx, q, 0, 2, 1, 3), ggml_permute(ctx, k, 0, 2, 1, 3),
                                 ggml_permute(ctx, v, 0, 2, 1, 3), mask, sinks};
    ggml_tensor * out = how.kind == attention_kind::flash ? flash(ctx, how, in) : plain(ctx, how, in);
    return ggml_reshape_2d(ctx, out, width, n_tokens);
}

namespace {

// What the attention of a layer gets for one token, without memory.
struct dummies {
    ggml_context_ptr ctx;
    layer_attention how;
    attention_inputs in;

    dummies(const layer_spec & layer, const cache_types & types)
        : ctx(new_ggml_context(64 * ggml_tensor_overhead() + ggml_graph_overhead())),
          how{attention_kind::plain, nullptr, layer.scale, layer.soft_cap, layer.max_bias} {
        const int64_t n_kv = MAX_SPAN_ALIGN;
        in.q = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, layer.head_dim_k, 1, layer.n_head);
        in.k = ggml_new_tensor_3d(ctx.get(), types.k, layer.head_dim_k, n_kv, layer.n_head_kv);
        in.v = ggml_new_tensor_3d(ctx.get(), types.v, layer.head_dim_v, n_kv, layer.n_head_kv);
        in.mask = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, n_kv, 1);
        in.sinks = layer.sinks ? ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, layer.n_head) : nullptr;
    }
};

} // namespace

bool can_plain_on(ggml_backend_dev_t device, const layer_spec & layer, const cache_types & types) {
    if (ggml_is_quantized(types.v)) {
        return false; // V is transposed, and a block of it can't be
    }
    const dummies d(layer, types);
    ggml_cgraph * graph = ggml_new_graph(d.ctx.get());
    ggml_build_forward_expand(graph, plain(d.ctx.get(), d.how, d.in));
    return can_run_all(device, graph);
}

bool can_flash_on(ggml_backend_dev_t device, const layer_spec & layer, const cache_types & types) {
    const dummies d(layer, types);
    return can_run(device, flash(d.ctx.get(), d.how, d.in));
}

} // namespace kvg
