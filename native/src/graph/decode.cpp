#include "graph/decode.h"

#include <set>

#include "device.h"
#include "fault.h"
#include "host_memory.h"
#include "model/rope.h"

namespace kvg {

// a layer has at most 58 nodes (plain attention, all biases, K and V rotated), the frame 12
size_t decode_graph::max_nodes(const hparams & h) { return 64u * h.n_layer() + 64u; }

decode_graph::decode_graph(const model & model, const kv_cache & cache, const std::vector<layer_attention> & attentions,
                           const decode_shape & shape)
    : model_(model), cache_(cache), attentions_(attentions), shape_(shape) {
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
    const layer_spec & spec = model_.hparams().layers[layer];
    const layer_weights & w = model_.layers()[layer];
    const kv_group & cells = cache_.group_of(layer);
    const kv_part & part = cells.part_of(layer);
    const group_inputs & in = groups[spec.group];
    const cell_span & span = shape_.spans[spec.group];
    const uint32_t n = shape_.n_tokens;
    ggml_backend_dev_t device = model_.placement().layer(layer);
    ggml_tensor * factors = model_.rope_factors(layer, device);
    const auto turned = [&](ggml_tensor * heads) {
        return spec.rope.n_rot > 0 ? rope(ctx, heads, positions, factors, spec.rope, false) : heads;
    };

    ggml_tensor * k = turned(ggml_reshape_3d(ctx, linear(x, w.wk, w.bk), spec.head_dim_k, spec.n_head_kv, n));
    ggml_tensor * v = linear(x, w.wv, w.bv);
    wish(device);
    if (part.hadamard_k) {
        k = part.hadamard_k->apply(ctx, k);
    }
    if (part.hadamard_v) {
        v = part.hadamard_v->apply(ctx, v);
    }
    // attention reads views of these nodes, not of the cache's tensors: that makes write-before-read an edge of the graph
    ggml_tensor * k_all = ggml_set_rows(ctx, cells.k(layer), ggml_reshape_2d(ctx, k, spec.k_width(), n), in.slots);
    ggml_tensor * v_all = ggml_set_rows(ctx, cells.v(layer), v, in.slots);
    ggml_build_forward_expand(graph_, k_all);
    ggml_build_forward_expand(graph_, v_all);
    wish(part.device);
    if (layer + 1 == model_.hparams().n_layer() && shape_.n_outputs == 0) {
        return nullptr;
    }
    ggml_tensor * q = turned(ggml_reshape_3d(ctx, linear(x, w.wq, w.bq), spec.head_dim_k, spec.n_head, n));
    wish(device);
    if (part.hadamard_k) {
        q = part.hadamard_k->apply(ctx, q);
    }
    ggml_tensor * heads = attention(ctx, attentions_[layer], q, cells.k_heads(ctx, k_all, span.begin, span.n),
                                    cells.v_heads(ctx, v_all, span.begin, span.n), in.mask);
    if (part.hadamard_v) {
        heads = part.hadamard_v->apply(ctx, heads);
    }
    wish(part.device);
    return heads;
}

ggml_tensor * decode_graph::feed_forward(ggml_tensor * x, const layer_weights & w) {
    ggml_tensor * gate = linear(x, w.ffn_gate, w.ffn_gate_b);
    ggml_tensor * up = linear(x, w.ffn_up, w.ffn_up_b);
    return linear(ggml_swiglu_split(ctx_.get(), gate, up), w.ffn_down, w.ffn_down_b);
}

void decode_graph::add_inputs() {
    const uint32_t n = shape_.n_tokens;
    tokens = input(GGML_TYPE_I32, n, 1);
    positions = input(GGML_TYPE_I32, n, 1);
    for (size_t i = 0; i < shape_.spans.size(); ++i) {
        // what is in no graph has no memory
        const bool attends = shape_.n_outputs > 0 || cache_.groups()[i].layers().front() + 1 < model_.hparams().n_layer();
        groups.push_back({input(GGML_TYPE_I64, n, 1), attends ? input(GGML_TYPE_F16, shape_.spans[i].n, n) : nullptr});
    }
    if (shape_.n_outputs > 0) {
        outputs = input(GGML_TYPE_I32, shape_.n_outputs, 1);
    }
}

void decode_graph::build() {
    ggml_context * ctx = ctx_.get();
    const uint32_t n_layer = model_.hparams().n_layer();
    add_inputs();
    ggml_tensor * x = ggml_get_rows(ctx, model_.token_embd(), tokens); // (n_embd, n_tokens)
    wish(model_.embedding_device());
    for (uint32_t il = 0; il < n_layer; ++il) {
        const layer_weights & w = model_.layers()[il];
        ggml_tensor * heads = self_attention(norm(x, w.attn_norm), il);
        if (!heads) {
            return;
        }
        if (il + 1 == n_layer) {
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
