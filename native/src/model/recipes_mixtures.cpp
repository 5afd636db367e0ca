// Recipes of more models with experts: behind dense layers, in all layers, or beside a dense feed-forward.
#include <cmath>

#include "error.h"
#include "model/recipes.h"

namespace kvg {

namespace {

constexpr auto NEOX = GGML_ROPE_TYPE_NEOX;
constexpr auto NORMAL = GGML_ROPE_TYPE_NORMAL;

// DeepSeek 1
void read_deepseek(const metadata & in, hparams & h) {
    read_weights(in, h);
    read_leading_dense(in, h);
    read_shared_count(in, h, 1);
    for (layer_spec & layer : h.layers) {
        layer.feed_forward.sums_to_1 = false;
    }
}

void read_deepseek_ocr(const metadata & in, hparams & h) {
    if (h.layers[0].rope.freq_base != 10000.0f) {
        fail(KVG_UNSUPPORTED, "%s: a rope of base %g; architecture '%s' has 10000", in.file().path().c_str(),
             static_cast<double>(h.layers[0].rope.freq_base), h.arch.c_str());
    }
    for (layer_spec & layer : h.layers) {
        layer.rope.freq_scale = 1.0f; // whatever a file says
        layer.rope.yarn = 0.0f;
        layer.rope.attn_factor = 1.0f;
    }
    read_gating(in, h, 1);
    read_weights(in, h);
    read_leading_dense(in, h);
    read_shared_count(in, h, 1);
}

void read_bailingmoe(const metadata & in, hparams & h) {
    read_weights(in, h);
    read_shared_count(in, h, 1);
}

// Layers without a window rotate nothing.
void read_exaone_moe(const metadata & in, hparams & h) {
    const uint32_t window = in.required("attention.sliding_window", 1, metadata::MAX_POSITION);
    read_windows_of_one_base(in, h, window, h.layers[0].rope.freq_scale);
    rotate_in_windows(h);
    read_gating(in, h, 0);
    read_weights(in, h);
    read_leading_dense(in, h);
    const uint32_t given = in.optional("expert_shared_feed_forward_length", 0, 0, metadata::MAX_WIDTH * 4);
    share(h, [&](uint64_t n_ff) { return given > 0 ? given : n_ff; });
}

// The first of every four layers sees all. Dense layers rotate, and of the others those with a window.
void read_cohere2moe(const metadata & in, hparams & h) {
    const uint32_t window = in.required("attention.sliding_window", 1, metadata::MAX_POSITION);
    const std::vector<bool> windowed = all_but_first_of(in, "attention.sliding_window_pattern", 4, h.n_layer());
    const float scale = in.required_number("logit_scale", 0.0f, 1e6f);
    h.logit_scale = scale > 0.0f ? scale : 1.0f;
    read_gating(in, h, 2);
    read_weights(in, h);
    read_leading_dense(in, h);
    const uint64_t n_shared = in.optional("expert_shared_count", 0, 0, 64);
    const uint32_t given = in.optional("expert_shared_feed_forward_length", 0, 0, metadata::MAX_WIDTH * 4);
    share(h, [&](uint64_t n_ff) { return n_shared > 0 && given > 0 ? given : n_shared * n_ff; });
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        layer_spec & layer = h.layers[il];
        layer.parallel = true;
        layer.window = windowed[il] ? window : 0;
        const bool rotates = layer.window > 0 || layer.feed_forward.n_expert == 0;
        layer.rope.n_rot = rotates ? layer.rope.n_rot : 0;
        layer.feed_forward.sum_scale = layer.feed_forward.n_ff_shared > 0 ? 0.5f : 0.0f;
    }
}

// A layer with a router has experts, and no dense feed-forward.
void choose_by_routers(hparams & h) {
    for (layer_spec & layer : h.layers) {
        layer.feed_forward.n_ff = layer.feed_forward.n_expert > 0 ? 0 : layer.feed_forward.n_ff;
    }
}

void read_hy_v3(const metadata & in, hparams & h) {
    read_gating(in, h, 2);
    read_weights(in, h);
    const uint32_t given = in.optional("expert_shared_feed_forward_length", 0, 0, metadata::MAX_WIDTH * 4);
    share(h, [&](uint64_t n_ff) { return given > 0 ? given : n_ff; });
    choose_by_routers(h);
}

// Layers with a window have another rope, and may have sinks.
void read_mimo2(const metadata & in, hparams & h) {
    choose_by_routers(h);
    require_array(in, h, "attention.sliding_window_pattern");
    read_windows(in, h, in.required("attention.sliding_window", 1, metadata::MAX_POSITION), 0, 10000.0f, 1.0f);
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        h.layers[il].sinks = in.file().find_tensor(strformat("blk.%u.attn_sinks.weight", il)) != nullptr;
        h.layers[il].out_scale = in.optional_number("attention.value_scale", 0.0f, 0.0f, 1e6f);
    }
}

// Experts see what the layer begins with, beside a dense feed-forward as wide as the embeddings.
void read_arctic(const metadata & in, hparams & h) {
    require_experts(in, h);
    for (layer_spec & layer : h.layers) {
        layer.feed_forward.n_ff = h.n_embd;
        layer.feed_forward.experts_first = true;
    }
}

// Experts are chosen by what the layer begins with. Where there are windows, layers without one rotate nothing.
void read_smallthinker(const metadata & in, hparams & h) {
    constexpr uint32_t WINDOW = 4096;
    read_gating(in, h, 0);
    const bool any_window = in.optional("attention.sliding_window", 0, 0, metadata::MAX_POSITION) > 0;
    const std::vector<bool> windowed = all_but_first_of(in, "attention.sliding_window_pattern", 4, h.n_layer());
    const float base = in.optional_number("rope.freq_base_swa", h.layers[0].rope.freq_base, 1e-3f, 1e12f);
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        layer_spec & layer = h.layers[il];
        layer.feed_forward.routes_first = true;
        if (any_window && windowed[il]) {
            layer.window = WINDOW;
            layer.rope.freq_base = base;
        }
        layer.rope.n_rot = any_window && il % 4 == 0 ? 0 : layer.rope.n_rot;
    }
}

// YaRN by keys of its own.
void read_ramp(const metadata & in, rope_params & rope) {
    const float share = in.optional_number("rope.scaling.yarn_ext_factor", -1.0f, -1.0f, 1.0f);
    rope.yarn = share < 0.0f ? rope.yarn : share;
    rope.attn_factor *= rope.yarn > 0.0f ? 1.0f : in.optional_number("rope.scaling.yarn_attn_factor", 1.0f, 1e-3f, 1e3f);
    rope.ramp_fast = in.optional_number("rope.scaling.yarn_beta_fast", 8.0f, 1e-3f, 1e6f);
    rope.ramp_slow = in.optional_number("rope.scaling.yarn_beta_slow", rope.ramp_slow, 1e-3f, 1e6f);
}

// Grok 1's files say nothing of its scales. A dense feed-forward may lie beside the experts.
void read_grok(const metadata & in, hparams & h) {
    require_experts(in, h);
    h.logit_scale = in.optional_number("logit_scale", 0.5773502691896257f, 0.0f, 1e6f);
    h.embedding_scale = in.optional_number("embedding_scale", 78.38367176906169f, 1e-6f, 1e6f);
    h.final_soft_cap = in.optional_number("final_logit_softcapping", 0.0f, 0.0f, 1e6f);
    const std::vector<uint32_t> n_ff = in.required_per_layer("feed_forward_length", h.n_layer(), 1, metadata::MAX_WIDTH * 4);
    const uint32_t given = in.optional("expert_feed_forward_length", 0, 0, metadata::MAX_WIDTH * 4);
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        layer_spec & layer = h.layers[il];
        layer.scale = in.optional_number("attention.output_scale", 0.08838834764831845f, 1e-6f, 1e6f);
        layer.soft_cap = in.optional_number("attn_logit_softcapping", 30.0f, 1e-3f, 1e6f);
        read_ramp(in, layer.rope);
        layer.feed_forward.n_ff_expert = given > 0 ? given : n_ff[il];
        if (!in.file().find_tensor(strformat("blk.%u.layer_output_norm.weight", il)) &&
            !in.file().find_tensor(strformat("blk.%u.post_ffw_norm.weight", il))) {
            fail(KVG_MODEL_LOAD, "%s: tensor 'blk.%u.layer_output_norm.weight' is missing", in.file().path().c_str(), il);
        }
        if (in.file().find_tensor(strformat("blk.%u.ffn_up.weight", il))) {
            layer.feed_forward.n_ff = n_ff[il];
            layer.feed_forward.sum_scale = std::sqrt(2.0f) / 2.0f;
        }
    }
}

arch_recipe arctic() {
    const auto expert_norm = tensors{vector_of("ffn_norm_exps.weight", role::expert_norm, extent::embd, presence::required)};
    return with_experts(
        recipe("arctic", NORMAL, frame(), attention() + ffn_norm() + expert_norm + unscaled(gated() + experts()), read_arctic),
        gating_kind::softmax, arch_recipe::allowed);
}

arch_recipe grok() {
    const auto norms = tensors{
        vector_of("attn_output_norm.weight", role::attn_post_norm, extent::embd, presence::required),
        vector_of("layer_output_norm.weight", role::ffn_post_norm, extent::embd, presence::optional),
        vector_of("post_ffw_norm.weight", role::ffn_post_norm, extent::embd, presence::optional),
    };
    arch_recipe r =
        with_experts(recipe("grok", NEOX, frame(), attention() + norms + ffn_norm() + unscaled(gated() + experts()), read_grok),
                     gating_kind::softmax, arch_recipe::allowed);
    r.activation = activation_kind::geglu;
    return r;
}

arch_recipe smallthinker() {
    arch_recipe r =
        with_experts(recipe("smallthinker", NEOX, frame(), attention() + ffn_norm() + unscaled(experts()), read_smallthinker),
                     gating_kind::softmax, arch_recipe::always);
    r.activation = activation_kind::reglu;
    return r;
}

arch_recipe cohere2moe() {
    arch_recipe r =
        with_experts(recipe("cohere2moe", NORMAL, frame(),
                            attention() + gated() + fused_experts() + shared_expert(presence::ignored), read_cohere2moe),
                     gating_kind::sigmoid, arch_recipe::always);
    r.norm = norm_kind::layer;
    r.norm_by_key = true;
    return r;
}

arch_recipe hy_v3() {
    const auto bias =
        tensors{vector_of("exp_probs_b", role::expert_choice_bias, extent::expert, presence::optional, with::experts)};
    return with_experts(
        recipe("hy_v3", NEOX, frame(),
               attention() + head_norms() + ffn_norm() + gated() + fused_experts() + shared_expert(presence::ignored) + bias,
               read_hy_v3),
        gating_kind::sigmoid, arch_recipe::beside);
}

// libllama adds no biases to Q, K and V, and multiplies them by no scales.
tensors bare_attention() {
    tensors all = attention();
    for (tensor_spec & t : all) {
        const bool is_bias =
            t.role == role::wqkv_bias || t.role == role::wq_bias || t.role == role::wk_bias || t.role == role::wv_bias;
        t.presence = is_bias ? presence::ignored : t.presence;
        t.scale = t.role != role::wo && t.scale == scale::applied ? scale::ignored : t.scale;
    }
    return all;
}

arch_recipe mimo2() {
    const auto sinks = tensors{vector_of("attn_sinks.weight", role::sinks, extent::heads, presence::optional)};
    return partial(with_experts(
        recipe("mimo2", NEOX, frame_untied(),
               bare_attention() + sinks + ffn_norm() + unscaled(gated() + experts()) + choice_bias(presence::optional),
               read_mimo2),
        gating_kind::sigmoid, arch_recipe::beside));
}

} // namespace

std::vector<arch_recipe> mixture_recipes() {
    using r = arch_recipe;
    constexpr auto softmax = gating_kind::softmax;
    const auto shared = shared_expert(presence::ignored);
    const auto layer = attention() + ffn_norm();
    const auto optional_bias = choice_bias(presence::optional);
    arch_recipe exaone_moe =
        with_experts(recipe("exaone-moe", NEOX, frame_untied(),
                            layer + head_norms() + optional_bias + unscaled(gated() + experts() + shared), read_exaone_moe),
                     gating_kind::sigmoid, r::always);
    exaone_moe.rope_factors = rope_factors::of_model;
    return {
        with_experts(recipe("deepseek", NORMAL, frame(), layer + unscaled(gated() + experts() + shared), read_deepseek),
                     softmax, r::always),
        with_experts(recipe("deepseek2-ocr", NEOX, frame(),
                            layer + optional_bias + unscaled(gated() + fused_experts() + shared), read_deepseek_ocr),
                     softmax, r::always),
        with_experts(recipe("bailingmoe", NORMAL, frame_untied(), layer + unscaled(experts() + shared), read_bailingmoe),
                     softmax, r::always),
        exaone_moe,
        cohere2moe(),
        hy_v3(),
        arctic(),
        grok(),
        smallthinker(),
        mimo2(),
    };
}

} // namespace kvg
