#include "graph/frame.h"

#include <set>

#include "device.h"
#include "fault.h"
#include "graph/block/feed_forward.h"
#include "graph/block/layer_embedding.h"
#include "graph/block/norm.h"

namespace kvg {

decode_graph::decode_graph(const model & model, const kv_cache & cache, const std::vector<layer_attention> & attentions,
                           const decode_shape & shape)
    : model_(model), cache_(cache), attentions_(attentions), shape_(shape), stored_(model.hparams().n_layer()) {
    fault_point("build");
    build();
    graph_ = builder_.finish();
}

std::string decode_graph::refused_by(ggml_backend_dev_t device) const {
    std::string names;
    std::set<std::string> seen;
    for (const auto & [node, wished] : wishes()) {
        if (wished == device && !can_run(device, node) && seen.insert(ggml_op_desc(node)).second) {
            names += std::string(names.empty() ? "" : ", ") + ggml_op_desc(node);
        }
    }
    return names;
}

void decode_graph::add_inputs() {
    const uint32_t n = shape_.n_tokens;
    tokens = builder_.input(GGML_TYPE_I32, n, 1);
    positions = builder_.input(GGML_TYPE_I32, n, 1);
    for (size_t i = 0; i < shape_.spans.size(); ++i) {
        // what is in no graph has no memory
        const bool attends = shape_.n_outputs > 0 || cache_.groups()[i].layers().front() < model_.hparams().last_owner();
        groups.push_back(
            {builder_.input(GGML_TYPE_I64, n, 1), attends ? builder_.input(GGML_TYPE_F16, shape_.spans[i].n, n) : nullptr});
    }
    if (shape_.n_outputs > 0) {
        outputs = builder_.input(GGML_TYPE_I32, shape_.n_outputs, 1);
    }
}

// What a token takes from those before it; nullptr when only the cells matter.
ggml_tensor * decode_graph::mix(ggml_tensor * x, uint32_t layer) {
    const layer_spec & spec = model_.hparams().layers[layer];
    const bool attends = layer < model_.hparams().last_owner() || shape_.n_outputs > 0;
    switch (model_.arch().mixing) {
    case mixing_kind::attention:
        return attention_block{model_,
                               layer,
                               cache_.group_of(layer),
                               attentions_[layer],
                               shape_.spans[spec.group],
                               positions,
                               groups[spec.group],
                               attends,
                               stored_[spec.kv_from]}
            .build(builder_, x);
    }
    return nullptr;
}

// Logits are capped as tanh does it.
static ggml_tensor * capped(builder & b, ggml_tensor * x, float cap) {
    x = ggml_tanh(b.ctx(), ggml_scale(b.ctx(), x, 1.0f / cap));
    return ggml_scale(b.ctx(), x, cap);
}

// One layer; nullptr when only the cells matter.
ggml_tensor * decode_graph::layer(ggml_tensor * x, uint32_t il) {
    builder & b = builder_;
    const struct hparams & h = model_.hparams();
    const norm_kind kind = model_.arch().norm;
    const role_tensors & w = model_.layers()[il];
    ggml_tensor * mixed = mix(norm(b, kind, x, w[role::attn_norm], h.rms_eps), il);
    if (!mixed) {
        return nullptr;
    }
    ggml_tensor * own = layer_embeddings_ ? embedding_of_layer(b, layer_embeddings_, il) : nullptr;
    if (il + 1 == h.n_layer()) {
        // from here on only the rows that were asked for
        mixed = ggml_get_rows(b.ctx(), mixed, outputs);
        x = ggml_get_rows(b.ctx(), x, outputs);
        own = own ? ggml_get_rows(b.ctx(), own, outputs) : nullptr;
    }
    mixed = b.linear(mixed, w[role::wo], w.scale(role::wo), w[role::wo_bias]);
    x = ggml_add(b.ctx(), norm(b, kind, mixed, w[role::attn_post_norm], h.rms_eps), x);
    x = ggml_add(b.ctx(), feed_forward(b, model_, il, x), x);
    x = own ? add_layer_embedding(b, model_, il, x, own) : x;
    x = w[role::layer_scale] ? ggml_mul(b.ctx(), x, w[role::layer_scale]) : x;
    b.wish(model_.placement().layer(il));
    return x;
}

void decode_graph::build() {
    builder & b = builder_;
    const struct hparams & h = model_.hparams();
    const role_tensors & w = model_.frame();
    add_inputs();
    ggml_tensor * x = ggml_get_rows(b.ctx(), w[role::token_embd], tokens); // (n_embd, n_tokens)
    if (h.embedding_scale != 1.0f) {
        x = ggml_scale(b.ctx(), x, h.embedding_scale);
    }
    b.wish(model_.embedding_device());
    if (h.n_embd_layer > 0) {
        layer_embeddings_ = layer_embeddings(b, model_, tokens, x);
    }
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        x = layer(x, il);
        if (!x) {
            return;
        }
    }
    embd = norm(b, model_.arch().norm, x, w[role::output_norm], h.rms_eps);
    ggml_set_output(embd);
    logits = b.linear(embd, w[role::output], nullptr, w[role::output_bias]);
    if (h.final_soft_cap > 0.0f) {
        logits = capped(b, logits, h.final_soft_cap);
    }
    ggml_set_output(logits);
    b.wish(model_.placement().output());
    b.root(logits);
}

} // namespace kvg
