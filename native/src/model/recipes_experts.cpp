// Recipes of models of experts behind a few dense layers.
#include <cmath>

#include "error.h"
#include "model/recipes.h"

namespace kvg {

namespace {

void read_minimax_m2(const metadata & in, hparams & h) {
    require_experts(in, h);
    read_gating(in, h, 0);
}

void read_bailingmoe2(const metadata & in, hparams & h) {
    read_gating(in, h, 0);
    read_weights(in, h);
    read_leading_dense(in, h);
    const uint64_t n_shared = in.required("expert_shared_count", 0, 64);
    const uint32_t given = in.optional("expert_shared_feed_forward_length", 0, 0, metadata::MAX_WIDTH);
    share(h, [&](uint64_t n_ff) { return n_shared * (given > 0 ? given : n_ff); });
}

void read_glm4moe(const metadata & in, hparams & h) {
    read_sections_of_halves(in, h);
    read_gating(in, h, 2);
    read_weights(in, h);
    read_leading_dense(in, h);
    read_shared_count(in, h, 0);
}

void read_dots1(const metadata & in, hparams & h) {
    read_gating(in, h, 0);
    read_weights(in, h);
    read_leading_dense(in, h);
    read_shared_count(in, h, 1);
}

// Of the layers behind the dense ones, every so many have experts.
void read_ernie_moe(const metadata & in, hparams & h) {
    const uint32_t step = in.required("interleave_moe_layer_step", 1, 1 << 16);
    const uint32_t n_dense = in.optional("leading_dense_block_count", 0, 0, h.n_layer());
    make_dense(in, h, [&](uint32_t il) { return il < n_dense || (il + 1) % step != 0; });
    const uint32_t given = in.optional("expert_shared_feed_forward_length", 0, 0, metadata::MAX_WIDTH * 4);
    share(h, [&](uint64_t) { return given; });
}

// Three layers of four attend to chunks, the others to all and by no rope; there queries are multiplied by more behind each chunk. Each of
// `step` layers has experts, which see their input multiplied by their weight.
void read_llama4(const metadata & in, hparams & h) {
    constexpr uint32_t CHUNK = 8192;
    if (in.optional("attention.sliding_window", CHUNK, 0, metadata::MAX_POSITION) == 0) {
        fail(KVG_UNSUPPORTED, "%s: no layer attends to chunks, and in architecture '%s' most do", in.file().path().c_str(),
             h.arch.c_str());
    }
    read_windows(in, h, CHUNK, 4, h.layers[0].rope.freq_base, h.layers[0].rope.freq_scale);
    h.temperature = {0.1f, static_cast<float>(CHUNK), 1.0f};
    const bool any_norm = h.layers[0].feed_forward.n_expert != 128; // the larger of the two has none
    const uint32_t step = in.required("interleave_moe_layer_step", 0, 1 << 16);
    make_dense(in, h, [&](uint32_t il) { return step == 0 || (il + 1) % step != 0; });
    share(h, [&](uint64_t n_ff) { return n_ff; });
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        layer_spec & layer = h.layers[il];
        const bool rotates = (il + 1) % 4 != 0;
        layer.chunked = layer.window > 0;
        layer.rope.n_rot = rotates ? layer.rope.n_rot : 0;
        layer.norm_last = rotates && any_norm;
        layer.tempered = !rotates;
        layer.feed_forward.sums_to_1 = false;
        layer.feed_forward.weighs_input = true;
    }
}

// How DeepSeek's queries and K are scaled beside YaRN. gain_share: of the gain that K's rotated part has, in units of YaRN's own; 0: not
// given
void read_deepseek_gains(hparams & h, float gain_share, bool rotates_with_gain) {
    for (layer_spec & layer : h.layers) {
        const float log_factor = -std::log(layer.rope.freq_scale);
        const float own_gain = 1.0f + 0.1f * log_factor;
        const float shared_gain = 1.0f + 0.1f * gain_share * log_factor;
        if (layer.rope.yarn > 0.0f && gain_share != 0.0f) {
            layer.rope.attn_factor /= rotates_with_gain ? shared_gain : own_gain;
        }
        const float gain = layer.rope.attn_factor * own_gain * shared_gain; // of queries and of K
        layer.scale *= gain * gain;
    }
}

// An older file says nothing of its gate.
uint32_t usual_gating(const metadata & in, const hparams & h) {
    const bool is_glm = (h.n_layer() == 47 || h.n_layer() == 48) &&
                        in.file().get_array_length("tokenizer.ggml.tokens").value_or(0) == 154880; // GLM-4.7 Flash
    return is_glm ? 2 : 1;
}

void read_deepseek(const metadata & in, hparams & h, bool rotates_with_gain) {
    read_gating(in, h, usual_gating(in, h));
    read_weights(in, h);
    read_leading_dense(in, h);
    read_shared_count(in, h, 1);
    h.temperature.scale = in.optional_number("attention.temperature_scale", 0.0f, 0.0f, 1e3f);
    if (h.temperature.scale > 0.0f) {
        h.temperature.length = static_cast<float>(in.required("attention.temperature_length", 1, metadata::MAX_POSITION));
    }
    const bool has_q_rank = in.file().find_tensor("blk.0.attn_q_a.weight") != nullptr;
    for (layer_spec & layer : h.layers) {
        read_latent(in, layer);
        if (layer.head_dim_v % 2 != 0) {
            fail(KVG_UNSUPPORTED, "%s: a latent of %u; rope rotates pairs behind it, and begins at an even dimension",
                 in.file().path().c_str(), layer.head_dim_v);
        }
        layer.rope.offset = static_cast<int>(layer.head_dim_v);
        layer.latent.q_rank = has_q_rank ? in.required("attention.q_lora_rank", 1, metadata::MAX_WIDTH) : 0;
        layer.tempered = h.temperature.scale > 0.0f;
    }
    // converters write a tenth of it
    const float gain_share = in.optional_number("rope.scaling.yarn_log_multiplier", 0.0f, 0.0f, 1e3f) / 0.1f;
    read_deepseek_gains(h, gain_share, rotates_with_gain);
}

// DeepSeek V2, V3 and R1, Kimi K2
void read_deepseek2(const metadata & in, hparams & h) { read_deepseek(in, h, false); }
void read_mistral4(const metadata & in, hparams & h) { read_deepseek(in, h, true); }

} // namespace

std::vector<arch_recipe> expert_recipes() {
    constexpr auto neox = GGML_ROPE_TYPE_NEOX;
    constexpr auto softmax = gating_kind::softmax;
    using r = arch_recipe;
    const auto mixed = unscaled(gated() + experts() + shared_expert(presence::ignored));
    const auto optional_head_norms = tensors{
        vector_of("attn_q_norm.weight", role::q_norm, extent::head_k, presence::optional),
        vector_of("attn_k_norm.weight", role::k_norm, extent::head_k, presence::optional),
    };
    const auto by_latent = [&](const char * name, void (*read)(const metadata & in, hparams & h)) {
        const auto layer = attn_norm() + latent_attention() + ffn_norm() + choice_bias(presence::optional) +
                           unscaled(gated() + fused_experts() + shared_expert(presence::ignored));
        return partial(with_experts(recipe(name, GGML_ROPE_TYPE_NORMAL, frame(), layer, read), softmax, r::always));
    };
    arch_recipe llama4 =
        with_experts(recipe("llama4", GGML_ROPE_TYPE_NORMAL, frame(), attention() + ffn_norm() + mixed, read_llama4),
                     gating_kind::sigmoid, r::always);
    llama4.rope_factors = rope_factors::of_model;
    return {
        with_draft_head(by_latent("deepseek2", read_deepseek2)),
        by_latent("mistral4", read_mistral4),
        llama4,
        partial(
            with_experts(recipe("minimax-m2", neox, frame(),
                                attention() + wide_norms() + ffn_norm() + unscaled(experts()) + choice_bias(presence::required),
                                read_minimax_m2),
                         gating_kind::sigmoid, r::allowed)),
        partial(with_experts(recipe("bailingmoe2", neox, frame(),
                                    attention() + head_norms() + ffn_norm() + mixed + choice_bias(presence::optional),
                                    read_bailingmoe2),
                             gating_kind::sigmoid, r::always)),
        with_draft_head(partial(with_experts(recipe("glm4moe", neox, frame(),
                                                    attention() + optional_head_norms + ffn_norm("post_attention_norm.weight") +
                                                        mixed + choice_bias(presence::required),
                                                    read_glm4moe),
                                             gating_kind::sigmoid, r::always))),
        with_experts(recipe("dots1", neox, frame(),
                            attention() + head_norms() + ffn_norm() + mixed + choice_bias(presence::optional), read_dots1),
                     gating_kind::sigmoid, r::always),
        with_experts(recipe("ernie4_5-moe", GGML_ROPE_TYPE_NORMAL, frame(),
                            attention() + output_bias_of_attention(presence::ignored) + ffn_norm() + mixed +
                                choice_bias(presence::optional),
                            read_ernie_moe),
                     softmax, r::always),
    };
}

} // namespace kvg
