#include "graph/decode.h"

#include <cmath>
#include <set>

#include "device.h"
#include "fault.h"
#include "graph/attention.h"
#include "host_memory.h"
#include "model/rope.h"

namespace kvg {

// a layer has at most 58 nodes (plain attention, all biases, K and V rotated), the frame 12
size_t decode_graph::max_nodes(const hparams & h) { return 64u * h.n_layer + 64u; }

decode_graph::decode_graph(const model & model, const kv_cache & cache, const std::vector<attention_kind> & kinds,
                           attend_workspace * workspace, const decode_shape & shape)
    : model_(model), cache_(cache), kinds_(kinds), workspace_(workspace), shape_(shape) {
    fault_point("build");
    const size_t n = max_nodes(model.hparams());
    arena_.resize(n * ggml_tensor_overhead() + ggml_graph_overhead_custom(n, false));
    ctx_ = new_ggml_context(arena_.size(), arena_.data());
    graph_ = ggml_new_graph_custom(ctx_.get(), n, false);
    build();
}

ggml_tensor * decode_graph::input(ggml_type type, int64_t ne0, int64_t ne1) {
    ggml_tensor * t = ggml_new_tensor_2d(ctx_.get(), type, ne0, ne1);
    ggml_set_input(t);
    return t;
}

void decode_graph::wish(ggml_backend_dev_t device) {
    ggml_tensor * t = last_wished_ ? ggml_get_next_tensor(ctx_.get(), last_wished_) : ggml_get_first_tensor(ctx_.get());
    for (; t; t = ggml_get_next_tensor(ctx_.get(), t)) {
        last_wished_ = t;
        const bool computes = t->op != GGML_OP_NONE && t->op != GGML_OP_RESHAPE && t->op != GGML_OP_VIEW &&
                              t->op != GGML_OP_PERMUTE && t->op != GGML_OP_TRANSPOSE;
        if (computes) {
            wishes_.emplace_back(t, device);
        }
    }
}

std::string decode_graph::refused_by(ggml_backend_dev_t device) const {
    std::string names;
    std::set<std::string> seen;
    for (const auto & [node, wished] : wishes_) {
        if (wished == device && !can_run(device, node) && seen.insert(ggml_op_desc(node)).second) {
            names += std::string(names.empty() ? "" : ", ") + ggml_op_desc(node);
        }
    }
    return names;
}

ggml_tensor * decode_graph::norm(ggml_tensor * x, ggml_tensor * weight) {
    return ggml_mul(ctx_.get(), ggml_rms_norm(ctx_.get(), x, model_.hparams().rms_eps), weight);
}

ggml_tensor * decode_graph::linear(ggml_tensor * x, ggml_tensor * weight, ggml_tensor * bias) {
    ggml_tensor * y = ggml_mul_mat(ctx_.get(), weight, x);
    return bias ? ggml_add(ctx_.get(), y, bias) : y;
}

// Writes K and V of the new tokens into their cells, then attends over the span.
// Returns (n_head * head_dim, n_tokens), or nullptr when only the cells matter: the last layer of a batch that asks for no output.
ggml_tensor * decode_graph::self_attention(ggml_tensor * x, uint32_t layer) {
    ggml_context * ctx = ctx_.get();
    const hparams & h = model_.hparams();
    const layer_weights & w = model_.layers()[layer];
    const uint32_t n = shape_.n_tokens;
    ggml_backend_dev_t device = model_.placement().layer(layer);
    ggml_tensor * freqs = model_.rope_freqs(device);

    ggml_tensor * k = ggml_reshape_3d(ctx, linear(x, w.wk, w.bk), h.head_dim, h.n_head_kv, n);
    k = rope(ctx, k, positions, freqs, h.rope, false);
    ggml_tensor * v = linear(x, w.wv, w.bv);
    wish(device);
    if (const hadamard * rotation = cache_.hadamard_k(layer)) {
        k = rotation->apply(ctx, k);
    }
    if (const hadamard * rotation = cache_.hadamard_v(layer)) {
        v = rotation->apply(ctx, v);
    }
    // attention reads views of these nodes, not of the cache's tensors: that makes write-before-read an edge of the graph
    ggml_tensor * k_all = ggml_set_rows(ctx, cache_.k(layer), ggml_reshape_2d(ctx, k, h.n_embd_kv(), n), slots);
    ggml_tensor * v_all = ggml_set_rows(ctx, cache_.v(layer), v, slots);
    ggml_build_forward_expand(graph_, k_all);
    ggml_build_forward_expand(graph_, v_all);
    wish(cache_.device(layer));
    if (layer + 1 == h.n_layer && shape_.n_outputs == 0) {
        return nullptr;
    }
    ggml_tensor * q = ggml_reshape_3d(ctx, linear(x, w.wq, w.bq), h.head_dim, h.n_head, n);
    q = rope(ctx, q, positions, freqs, h.rope, false);
    wish(device);
    if (const hadamard * rotation = cache_.hadamard_k(layer)) {
        q = rotation->apply(ctx, q);
    }
    ggml_tensor * heads = attention(ctx, kinds_[layer], q, cache_.heads(ctx, k_all, shape_.kv_begin, shape_.n_kv),
                                    cache_.heads(ctx, v_all, shape_.kv_begin, shape_.n_kv), mask,
                                    1.0f / std::sqrt(static_cast<float>(h.head_dim)), workspace_);
    if (const hadamard * rotation = cache_.hadamard_v(layer)) {
        heads = rotation->apply(ctx, heads);
    }
    wish(cache_.device(layer));
    return heads;
}

ggml_tensor * decode_graph::feed_forward(ggml_tensor * x, const layer_weights & w) {
    ggml_tensor * gate = linear(x, w.ffn_gate, w.ffn_gate_b);
    ggml_tensor * up = linear(x, w.ffn_up, w.ffn_up_b);
    return linear(ggml_swiglu_split(ctx_.get(), gate, up), w.ffn_down, w.ffn_down_b);
}

void decode_graph::build() {
    ggml_context * ctx = ctx_.get();
    const hparams & h = model_.hparams();
    tokens = input(GGML_TYPE_I32, shape_.n_tokens, 1);
    positions = input(GGML_TYPE_I32, shape_.n_tokens, 1);
    slots = input(GGML_TYPE_I64, shape_.n_tokens, 1);
    if (h.n_layer > 1 || shape_.n_outputs > 0) { // else no layer attends, and what is in no graph has no memory
        mask = input(GGML_TYPE_F16, shape_.n_kv, shape_.n_tokens);
    }
    if (shape_.n_outputs > 0) {
        outputs = input(GGML_TYPE_I32, shape_.n_outputs, 1);
    }
    ggml_tensor * x = ggml_get_rows(ctx, model_.token_embd(), tokens); // (n_embd, n_tokens)
    wish(model_.embedding_device());
    for (uint32_t il = 0; il < h.n_layer; ++il) {
        const layer_weights & w = model_.layers()[il];
        ggml_tensor * heads = self_attention(norm(x, w.attn_norm), il);
        if (!heads) {
            return;
        }
        if (il + 1 == h.n_layer) {
            // from here on only the rows that were asked for
            heads = ggml_get_rows(ctx, heads, outputs);
            x = ggml_get_rows(ctx, x, outputs);
        }
        x = ggml_add(ctx, linear(heads, w.wo, w.bo), x);
        x = ggml_add(ctx, feed_forward(norm(x, w.ffn_norm), w), x);
        wish(model_.placement().layer(il));
    }
    embd = norm(x, model_.output_norm());
    ggml_set_output(embd);
    logits = ggml_mul_mat(ctx, model_.output(), embd);
    ggml_set_output(logits);
    wish(model_.placement().output());
    ggml_build_forward_expand(graph_, logits);
}

} // namespace kvg
