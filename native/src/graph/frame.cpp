#include "graph/frame.h"

#include <set>

#include "device.h"
#include "fault.h"
#include "graph/block/feed_forward.h"
#include "graph/block/norm.h"

namespace kvg {

decode_graph::decode_graph(const model & model, const kv_cache & cache, const std::vector<layer_attention> & attentions,
                           const decode_shape & shape)
    : model_(model), cache_(cache), attentions_(attentions), shape_(shape) {
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
        const bool attends = shape_.n_outputs > 0 || cache_.groups()[i].layers().front() + 1 < model_.hparams().n_layer();
        groups.push_back(
            {builder_.input(GGML_TYPE_I64, n, 1), attends ? builder_.input(GGML_TYPE_F16, shape_.spans[i].n, n) : nullptr});
    }
    if (shape_.n_outputs > 0) {
        outputs = builder_.input(GGML_TYPE_I32, shape_.n_outputs, 1);
    }
}

// What a token takes from those before it; nullptr when only the cells matter.
ggml_tensor * decode_graph::mix(ggml_tensor * x, uint32_t layer) {
    const uint32_t group = model_.hparams().layers[layer].group;
    const bool attends = layer + 1 < model_.hparams().n_layer() || shape_.n_outputs > 0;
    switch (model_.arch().mixing) {
    case mixing_kind::attention:
        return attention_block{
            model_, layer, cache_.group_of(layer), attentions_[layer], shape_.spans[group], positions, groups[group], attends}
            .build(builder_, x);
    }
    return nullptr;
}

void decode_graph::build() {
    builder & b = builder_;
    const uint32_t n_layer = model_.hparams().n_layer();
    const float eps = model_.hparams().rms_eps;
    const norm_kind kind = model_.arch().norm;
    add_inputs();
    ggml_tensor * x = ggml_get_rows(b.ctx(), model_.token_embd(), tokens); // (n_embd, n_tokens)
    b.wish(model_.embedding_device());
    for (uint32_t il = 0; il < n_layer; ++il) {
        const layer_weights & w = model_.layers()[il];
        ggml_tensor * mixed = mix(norm(b, kind, x, w[role::attn_norm], eps), il);
        if (!mixed) {
            return;
        }
        if (il + 1 == n_layer) {
            // from here on only the rows that were asked for
            mixed = ggml_get_rows(b.ctx(), mixed, outputs);
            x = ggml_get_rows(b.ctx(), x, outputs);
        }
        x = ggml_add(b.ctx(), b.linear(mixed, w[role::wo], w[role::wo_bias]), x);
        ggml_tensor * normed = norm(b, kind, x, w[role::ffn_norm], eps);
        x = ggml_add(b.ctx(), feed_forward(b, model_.hparams().layers[il].feed_forward, w, normed), x);
        b.wish(model_.placement().layer(il));
    }
    embd = norm(b, kind, x, model_.output_norm(), eps);
    ggml_set_output(embd);
    logits = ggml_mul_mat(b.ctx(), model_.output(), embd);
    ggml_set_output(logits);
    b.wish(model_.placement().output());
    b.root(logits);
}

} // namespace kvg
