#include "graph/frame.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "device.h"
#include "fault.h"
#include "graph/block/altup.h"
#include "graph/block/assistant.h"
#include "graph/block/feed_forward.h"
#include "graph/block/layer_embedding.h"
#include "graph/block/norm.h"
#include "graph/block/state.h"
#include "graph/expert_product.h"
#include "graph/product.h"
#include "graph/rms_norm.h"
#include "graph/router.h"

namespace kvg {

decode_graph::decode_graph(const model & model, const kv_cache & cache, const std::vector<layer_attention> & attentions,
                           const std::vector<recur_op *> & recurs, const std::vector<active_adapter> & adapters,
                           const decode_shape & shape)
    : model_(model), cache_(cache), attentions_(attentions), recurs_(recurs), shape_(shape), stored_(cache.n_layer()),
      builder_(adapters) {
    fault_point("build");
    build();
    graph_ = builder_.finish();
    is_for_team_ = has_few_products_of_ggml();
}

bool decode_graph::has_few_products_of_ggml() const {
    constexpr uint64_t FEW = 16; // of so many pairs of numbers one
    uint64_t ours = 0;
    uint64_t others = 0;
    for (const auto & [node, device] : wishes()) {
        const bool is_ggmls =
            node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID || node->op == GGML_OP_FLASH_ATTN_EXT;
        if (is_cpu(device) && (is_ggmls || is_multiply(node) || is_expert_product(node) || is_expert_scores(node))) {
            const auto n_pairs = static_cast<uint64_t>(ggml_nelements(node) * node->src[0]->ne[0]);
            (is_ggmls ? others : ours) += n_pairs;
        }
    }
    return FEW * others < ours;
}

// As ggml names what a node computes; "" for a step beside a product of ours.
static std::string operation_of(const ggml_tensor * node) {
    if (is_multiply(node) || is_expert_scores(node)) {
        return ggml_op_name(GGML_OP_MUL_MAT);
    }
    if (is_expert_product(node)) {
        return ggml_op_name(GGML_OP_MUL_MAT_ID);
    }
    if (is_rms_norm(node)) {
        return ggml_op_name(GGML_OP_RMS_NORM);
    }
    if (const char * name = recur_op::name_of(node)) {
        return name;
    }
    return node->op == GGML_OP_CUSTOM ? "" : ggml_op_desc(node); // rows as bytes, tokens by expert, what experts give together
}

std::string decode_graph::refused_by(ggml_backend_dev_t device) const {
    std::string names;
    std::set<std::string> seen = {""};
    for (const auto & [node, wished] : wishes()) {
        if (wished == device && !can_run(device, node) && seen.insert(operation_of(node)).second) {
            names += (names.empty() ? "" : ", ") + operation_of(node);
        }
    }
    return names;
}

// Whether anything of a layer is in this graph.
bool decode_graph::computes(const layer_spec & layer) const {
    const struct hparams & h = model_.hparams();
    return !shape_.drafts || h.n_embd_target > 0 || h.is_draft_head(static_cast<uint32_t>(&layer - h.layers.data()));
}

void decode_graph::add_token_inputs() {
    const uint32_t n = shape_.n_tokens;
    const struct hparams & h = model_.hparams();
    if (h.is_first()) {
        tokens = builder_.input("tokens", GGML_TYPE_I32, n, 1);
    }
    if (!h.is_first() || shape_.drafts || h.n_draft_heads > 0) {
        hidden = builder_.input("hidden", GGML_TYPE_F32, h.n_embd_target > 0 ? h.n_embd_target : h.n_embd, n);
    }
    if (h.n_draft_heads > 0 && !shape_.drafts) {
        previous = builder_.input("previous", GGML_TYPE_I32, n, 1);
    }
}

void decode_graph::add_inputs() {
    add_token_inputs();
    const uint32_t n = shape_.n_tokens;
    const struct hparams & h = model_.hparams();
    const std::vector<layer_spec> & layers = h.layers;
    const auto rotates = [&](const layer_spec & l) { return computes(l) && l.attends() && l.rope.n_rot > 0; };
    if ((h.learned_positions && h.is_first()) || std::any_of(layers.begin(), layers.end(), rotates)) {
        positions = builder_.input("positions", GGML_TYPE_I32, n, 1); // what is in no graph has no memory
    }
    const auto is_tempered = [&](const layer_spec & l) {
        return computes(l) && l.tempered && l.attends() && gives(static_cast<uint32_t>(&l - layers.data()));
    };
    if (std::any_of(layers.begin(), layers.end(), is_tempered)) {
        temperatures = builder_.input("temperatures", GGML_TYPE_F32, 1, 1, n);
    }
    for (uint32_t i = 0; i < shape_.spans.size(); ++i) {
        bool is_used = false;
        bool attends = false;
        for (uint32_t il = 0; il < h.n_layer(); ++il) {
            const bool is_member = layers[il].attends() && layers[il].group == i && computes(layers[il]);
            is_used = is_used || (is_member && layers[il].kv_from == il && !layers[il].of_target);
            attends = attends || (is_member && gives(il));
        }
        groups.push_back({is_used ? builder_.input("cells", GGML_TYPE_I64, n, 1) : nullptr,
                          attends ? builder_.input("mask", GGML_TYPE_F16, shape_.spans[i].n, n) : nullptr});
    }
    for (const state_group & group : shape_.state_groups) {
        states.push_back({builder_.input("states_from", GGML_TYPE_I32, group.n_seqs, 1),
                          builder_.input("states_to", GGML_TYPE_I64, group.n_seqs, 1)});
    }
    if (!shape_.in_order) {
        order = builder_.input("order", GGML_TYPE_I32, n, 1);
        places = builder_.input("places", GGML_TYPE_I32, n, 1);
    }
    if (shape_.n_outputs > 0 && h.is_last()) {
        outputs = builder_.input("outputs", GGML_TYPE_I32, shape_.n_outputs, 1);
    }
}

// Whether anything after the layer's cells and states matters.
bool decode_graph::gives(uint32_t layer) const {
    const struct hparams & h = model_.hparams();
    return h.is_draft_head(layer) ? shape_.drafts : layer < h.last_owner() || shape_.n_outputs > 0;
}

// nullptr: the layer's cells are read where they lie, or it doesn't attend
const row_turn * decode_graph::turn_of(uint32_t layer) const {
    const row_turn * turn = cache_.working() ? &cache_.working()->of(layer) : nullptr;
    return turn && turn->device ? turn : nullptr;
}

// (n_head * head_dim_v, n_tokens), or nullptr when only the cells matter
ggml_tensor * decode_graph::attend(ggml_tensor * x, uint32_t layer) {
    const layer_spec & spec = model_.hparams().layers[layer];
    return attention_block{model_,
                           layer,
                           cache_.groups()[spec.group],
                           attentions_[layer],
                           shape_.spans[spec.group],
                           positions,
                           temperatures,
                           groups[spec.group],
                           turn_of(layer),
                           gives(layer),
                           stored_[spec.kv_from]}
        .build(builder_, x);
}

// In the last layer only the rows that were asked for. Behind it a draft head needs all of them.
ggml_tensor * decode_graph::asked(ggml_tensor * x, uint32_t layer) {
    return layer + 1 == model_.hparams().n_layer() ? ggml_get_rows(builder_.ctx(), x, outputs) : x;
}

// What the layer's states give, (v_width or n_channels, n_tokens), or nullptr when only these matter. On a device they take the tokens in
// the order of the shape's groups.
ggml_tensor * decode_graph::recall(ggml_tensor * x, uint32_t layer) {
    builder & b = builder_;
    if (recur_op * own = recurs_[layer]) {
        return state_block{model_, layer, *own, own, gives(layer)}.build(b, x);
    }
    const struct hparams & h = model_.hparams();
    recur_ggml there(h.layers[layer].state, h.norm_eps, cache_.states().rows().on_device(layer), shape_.state_groups, states);
    x = order ? ggml_get_rows(b.ctx(), x, order) : x;
    ggml_tensor * out = state_block{model_, layer, there, nullptr, gives(layer)}.build(b, x);
    return out && places ? ggml_get_rows(b.ctx(), out, places) : out;
}

// What a token takes from those before it, by attention, a state or both; nullptr when only cells and states matter.
ggml_tensor * decode_graph::mix(ggml_tensor * x, uint32_t layer) {
    builder & b = builder_;
    const layer_spec & spec = model_.hparams().layers[layer];
    const role_tensors & w = model_.layers()[layer];
    ggml_tensor * heads = spec.attends() ? attend(x, layer) : nullptr;
    ggml_tensor * recalled = spec.recurs() ? recall(x, layer) : nullptr;
    ggml_tensor * sum = nullptr;
    if (w[role::linear] && gives(layer)) {
        sum = b.linear(asked(x, layer), w[role::linear], w.scale(role::linear), nullptr);
    }
    if (heads) {
        sum = b.linear(asked(heads, layer), w[role::wo], w.scale(role::wo), w[role::wo_bias]);
        sum = spec.out_scale > 0.0f ? ggml_scale(b.ctx(), sum, spec.out_scale) : sum;
    }
    if (recalled) {
        recalled = b.linear(asked(recalled, layer), w[role::state_out], w.scale(role::state_out), nullptr);
        sum = sum ? ggml_add(b.ctx(), sum, recalled) : recalled;
    }
    return sum;
}

// Logits are capped as tanh does it.
static ggml_tensor * capped(builder & b, ggml_tensor * x, float cap) {
    x = ggml_tanh(b.ctx(), ggml_scale(b.ctx(), x, 1.0f / cap));
    return ggml_scale(b.ctx(), x, cap);
}

// What a layer adds.
ggml_tensor * decode_graph::add(ggml_tensor * x, ggml_tensor * added) {
    const float scale = model_.hparams().residual_scale;
    added = scale == 1.0f ? added : ggml_scale(builder_.ctx(), added, scale);
    return builder_.sum(added, x);
}

// One layer; nullptr when only cells and states matter.
ggml_tensor * decode_graph::layer(ggml_tensor * x, uint32_t il) {
    builder & b = builder_;
    const struct hparams & h = model_.hparams();
    const norm_kind kind = model_.hparams().norm;
    const layer_spec & spec = h.layers[il];
    const role_tensors & w = model_.layers()[il];
    ggml_tensor * in = nullptr;
    ggml_tensor * mixed = nullptr;
    if (turn_of(il)) {
        turns_.push_back({il, gives(il), il == h.here.begin ? nullptr : x});
    }
    if (spec.attends() || spec.recurs() || w[role::linear]) {
        in = norm_of_model(b, h, x, w[role::attn_norm], w[role::attn_norm_bias]);
        const bool is_apart = w[role::mix_norm] != nullptr;
        mixed = mix(is_apart ? norm(b, kind, x, w[role::mix_norm], h.norm_eps, w[role::mix_norm_bias]) : in, il);
    }
    if (!gives(il)) {
        return nullptr;
    }
    ggml_tensor * own = layer_embeddings_ ? asked(embedding_of_layer(b, layer_embeddings_, il), il) : nullptr;
    x = asked(x, il);
    ggml_tensor * seen = x;
    if (spec.parallel) {
        ggml_tensor * fed = w[role::ffn_norm] ? x : asked(in, il);
        x = add(x, ggml_add(b.ctx(), feed_forward(b, model_, il, fed, seen), mixed));
    } else {
        x = mixed ? add(x, norm(b, kind, mixed, w[role::attn_post_norm], h.post_norm_eps)) : x;
        x = norm(b, kind, x, w[role::attn_sum_norm], h.norm_eps, w[role::attn_sum_norm_bias]);
        if (w[role::attn_sum_norm_2]) {
            x = norm(b, kind, ggml_add(b.ctx(), x, seen), w[role::attn_sum_norm_2], h.norm_eps, w[role::attn_sum_norm_2_bias]);
        }
        x = spec.feed_forward.feeds() ? add(x, feed_forward(b, model_, il, x, seen)) : x;
        x = norm(b, kind, x, w[role::ffn_sum_norm], h.norm_eps, w[role::ffn_sum_norm_bias]);
    }
    x = own ? ggml_add(b.ctx(), x, made_of_layer_embedding(b, model_, il, x, own)) : x;
    x = w[role::layer_scale] ? ggml_mul(b.ctx(), x, w[role::layer_scale]) : x;
    b.wish(model_.placement().layer(il));
    return x;
}

// One layer of a model with several states for each token, so too. states (n_embd, n_altup, n_tokens)
ggml_tensor * decode_graph::layer_of_states(ggml_tensor * states, uint32_t il) {
    builder & b = builder_;
    const float eps = model_.hparams().norm_eps;
    const norm_kind kind = model_.hparams().norm;
    const role_tensors & w = model_.layers()[il];
    if (turn_of(il)) {
        turns_.push_back({il, gives(il), il == 0 ? nullptr : states});
    }
    ggml_tensor * guess = altup_guess(b, model_, il, states);
    ggml_tensor * in = norm(b, kind, altup_active(b, guess), w[role::attn_norm], eps);
    ggml_tensor * mixed = mix(in, il);
    if (!gives(il)) {
        return nullptr;
    }
    guess = asked(ggml_reshape_2d(b.ctx(), guess, guess->ne[0] * guess->ne[1], guess->ne[2]), il);
    guess = ggml_reshape_3d(b.ctx(), guess, states->ne[0], states->ne[1], guess->ne[1]);
    ggml_tensor * x = add(altup_active(b, guess), norm(b, kind, mixed, w[role::attn_post_norm], eps));
    x = ggml_add(b.ctx(), x, laurel(b, model_, il, asked(in, il)));
    x = ggml_scale(b.ctx(), x, 1.0f / std::sqrt(2.0f));
    x = add(x, feed_forward(b, model_, il, x, x));
    states = altup_corrected(b, model_, il, guess, x);
    ggml_tensor * own = asked(embedding_of_layer(b, layer_embeddings_, il), il);
    states = altup_with_own(b, model_, il, states, own);
    b.wish(model_.placement().layer(il));
    return states;
}

// What the first layer begins with: (n_embd, n_tokens).
ggml_tensor * decode_graph::embedded() {
    builder & b = builder_;
    const struct hparams & h = model_.hparams();
    const role_tensors & w = model_.frame();
    ggml_tensor * x = b.embeddings(w[role::token_embd], tokens);
    if (h.embedding_scale != 1.0f) {
        x = ggml_scale(b.ctx(), x, h.embedding_scale);
    }
    b.wish(model_.embedding_device());
    if (ggml_tensor * types = w[role::type_embd]) {
        x = ggml_add(b.ctx(), x, ggml_view_1d(b.ctx(), types, types->ne[0], 0)); // of the first kind
    }
    if (h.learned_positions) {
        b.wish(model_.placement().layer(0));
        ggml_tensor * of_positions = ggml_get_rows(b.ctx(), w[role::position_embd], positions);
        b.wish(cpu_device());
        x = ggml_add(b.ctx(), x, of_positions);
    }
    x = norm(b, h.norm, x, w[role::embd_norm], h.norm_eps, w[role::embd_norm_bias]);
    x = h.embd_normed ? normalized(b, h.norm, x, h.norm_eps) : x;
    b.wish(model_.placement().layer(0));
    return ggml_set_name(x, "embedded");
}

void decode_graph::add_logits(ggml_tensor * output, ggml_tensor * scale) {
    builder & b = builder_;
    const struct hparams & h = model_.hparams();
    logits = b.linear(embd, output, scale, model_.frame()[role::output_bias]);
    logits = h.logit_scale == 1.0f ? logits : ggml_scale(b.ctx(), logits, h.logit_scale);
    if (h.final_soft_cap > 0.0f) {
        logits = capped(b, logits, h.final_soft_cap);
    }
    ggml_set_output(ggml_set_name(logits, "logits"));
}

// What a draft head makes of each token and the state before it, (n_embd, n_tokens): its layer begins with that.
ggml_tensor * decode_graph::draft_begin(ggml_tensor * before) {
    builder & b = builder_;
    const struct hparams & h = model_.hparams();
    const role_tensors & w = model_.layers().back();
    ggml_tensor * own = w[role::draft_embd];
    ggml_tensor * x = b.embeddings(own ? own : model_.frame()[role::token_embd], tokens);
    b.wish(own ? cpu_device() : model_.embedding_device());
    x = norm_of_model(b, h, x, w[role::draft_embd_norm], nullptr);
    before = norm_of_model(b, h, before, w[role::draft_state_norm], nullptr);
    x = b.linear(ggml_concat(b.ctx(), x, before, 0), w[role::draft_in], w.scale(role::draft_in), nullptr);
    b.wish(model_.placement().layer(h.n_layer() - 1));
    return x;
}

// The tokens get K and V in a draft head's cells, too: drafts behind them attend to these.
void decode_graph::add_draft_cells() {
    builder & b = builder_;
    ggml_tensor * before = ggml_concat(b.ctx(), hidden, normed, 1);
    before = ggml_get_rows(b.ctx(), before, previous);
    b.wish(model_.placement().output());
    layer(draft_begin(before), model_.hparams().n_layer() - 1);
}

void decode_graph::add_draft() {
    builder & b = builder_;
    const struct hparams & h = model_.hparams();
    const role_tensors & w = model_.layers().back();
    const role_tensors & of_model = model_.frame();
    ggml_tensor * x = layer(draft_begin(hidden), h.n_layer() - 1);
    ggml_tensor * own_norm = w[role::draft_norm];
    embd = own_norm ? norm(b, h.draft_norm, x, own_norm, h.draft_norm_eps)
                    : norm_of_model(b, h, x, of_model[role::output_norm], of_model[role::output_norm_bias]);
    ggml_set_output(ggml_set_name(embd, "embedding"));
    ggml_tensor * own = w[role::draft_output];
    add_logits(own ? own : of_model[role::output], own ? w.scale(role::draft_output) : nullptr);
    b.wish(own ? model_.placement().layer(h.n_layer() - 1) : model_.placement().output());
    b.root(logits);
}

// An assistant's: all of its layers draft.
void decode_graph::add_assistant() {
    builder & b = builder_;
    const struct hparams & h = model_.hparams();
    ggml_tensor * x = assistant_begin(b, model_, tokens, hidden);
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        x = layer(x, il);
    }
    x = norm_of_model(b, h, x, model_.frame()[role::output_norm], nullptr);
    embd = x;
    add_logits(model_.frame()[role::output], nullptr);
    embd = assistant_state(b, model_, x);
    ggml_set_output(ggml_set_name(embd, "embedding"));
    b.wish(model_.placement().output());
    b.root(logits);
    b.root(embd);
}

// x: what the last layer gives, of the tokens that were asked for; with a draft head of all.
void decode_graph::add_outputs(ggml_tensor * x) {
    builder & b = builder_;
    const struct hparams & h = model_.hparams();
    const role_tensors & w = model_.frame();
    x = h.n_altup > 0 ? altup_merged(b, model_, x) : x;
    x = norm_of_model(b, h, x, w[role::output_norm], w[role::output_norm_bias]);
    if (h.n_draft_heads > 0) {
        normed = ggml_set_name(x, "normed");
        ggml_set_output(normed);
        b.wish(model_.placement().output());
        b.root(normed);
        add_draft_cells();
        if (!outputs) {
            return;
        }
        x = ggml_get_rows(b.ctx(), x, outputs);
    }
    embd = x;
    if (w[role::dense_in]) {
        embd = b.product(b.product(embd, w[role::dense_in]), w[role::dense_out]);
    }
    ggml_set_output(ggml_set_name(embd, "embedding"));
    if (h.gives_logits()) {
        add_logits(w[role::output], nullptr);
    }
    b.wish(model_.placement().output());
    b.root(h.gives_logits() ? logits : embd);
}

void decode_graph::build() {
    builder & b = builder_;
    const struct hparams & h = model_.hparams();
    add_inputs();
    if (shape_.drafts) {
        if (model_.target()) {
            add_assistant();
        } else {
            add_draft();
        }
        return;
    }
    ggml_tensor * x = h.is_first() ? embedded() : hidden;
    if (h.n_embd_layer > 0) {
        layer_embeddings_ = layer_embeddings(b, model_, tokens, x);
    }
    if (h.n_altup > 0) {
        x = altup_states(b, model_, x);
        b.wish(model_.placement().layer(0));
    }
    for (uint32_t il = h.here.begin; il < h.here.end - h.n_draft_heads; ++il) {
        x = h.n_altup > 0 ? layer_of_states(x, il) : layer(x, il);
        if (!x) {
            return;
        }
        named(x, "layer", il);
    }
    if (!h.is_last()) {
        embd = x;
        ggml_set_output(embd);
        b.root(embd);
        return;
    }
    add_outputs(x);
}

} // namespace kvg
