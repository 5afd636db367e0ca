// Recipes of models whose layers attend and feed forward.
#include <cmath>

#include "model/recipes.h"

namespace kvg {

namespace {

// Rerankers say by two classes whether a document answers a question.
void read_qwen3(const metadata & in, hparams & h) {
    read_classifier(in, h);
    h.classifier.end = classifier_end::softmax;
}

// The text side of models that also see pictures.
void read_qwen2vl(const metadata & in, hparams & h) { require_sections_of_halves(in, h); }

void read_qwen3vlmoe(const metadata & in, hparams & h) { require_sections_in_turn(in, h); }

void read_qwen3vl(const metadata & in, hparams & h) {
    read_qwen3(in, h);
    read_qwen3vlmoe(in, h);
}

void read_gpt_oss(const metadata & in, hparams & h) {
    const uint32_t window = in.required("attention.sliding_window", 1, metadata::MAX_POSITION);
    const rope_params rope = h.layers[0].rope;
    read_windows(in, h, window, 2, rope.freq_base, rope.freq_scale);
    for (layer_spec & layer : h.layers) {
        layer.sinks = true;
    }
}

// Ministral 3: queries are multiplied by more behind each length of the original context, and YaRN's gain is less.
void read_mistral3(const metadata & in, hparams & h) {
    const float gain_share = in.optional_number("rope.scaling.yarn_log_multiplier", 0.0f, 0.0f, 1e3f);
    const rope_params & first = h.layers[0].rope;
    h.temperature = {in.optional_number("attention.temperature_scale", 0.0f, 0.0f, 1e3f), static_cast<float>(first.n_ctx_orig),
                     0.0f};
    for (layer_spec & layer : h.layers) {
        rope_params & rope = layer.rope;
        rope.ramp_fast = in.optional_number("rope.scaling.yarn_beta_fast", rope.ramp_fast, 1e-3f, 1e6f);
        rope.ramp_slow = in.optional_number("rope.scaling.yarn_beta_slow", rope.ramp_slow, 1e-3f, 1e6f);
        if (rope.yarn > 0.0f && rope.freq_scale < 1.0f) {
            rope.attn_factor /= 1.0f - 0.1f * gain_share * std::log(rope.freq_scale);
        }
        layer.tempered = h.temperature.scale > 0.0f;
    }
}

} // namespace

std::vector<arch_recipe> plain_recipes() {
    const auto output_bias = tensors{vector_of("output.bias", role::output_bias, extent::vocab, presence::optional)};
    const auto unused_bias = tensors{vector_of("output.bias", role::count, extent::vocab, presence::ignored)};
    const auto sinks = tensors{vector_of("attn_sinks.weight", role::sinks, extent::heads, presence::required)};
    constexpr auto neox = GGML_ROPE_TYPE_NEOX;
    constexpr auto normal = GGML_ROPE_TYPE_NORMAL;
    constexpr auto softmax = gating_kind::softmax;
    using r = arch_recipe;
    const auto normed = attention() + head_norms() + ffn_norm();
    const auto llama_layer =
        attention() + output_bias_of_attention(presence::optional) + ffn_norm() + gated() + gated_biases() + experts();
    // Llama 1-3, Mistral, Mixtral, TinyLlama, SmolLM, ...
    arch_recipe llama = with_experts(recipe("llama", normal, frame(), llama_layer, nullptr), softmax, r::allowed);
    llama.rope_factors = rope_factors::of_model;
    arch_recipe mistral3 = llama;
    mistral3.name = "mistral3";
    mistral3.read = read_mistral3;
    // its files name a window, which libllama doesn't use either: they don't say it right (llama.cpp #13676)
    arch_recipe phi3 = recipe("phi3", neox, frame(), attention() + ffn_norm() + unscaled(gated_in_one()), nullptr);
    phi3.rope_factors = rope_factors::by_length;
    phi3.partial_rope = true;
    arch_recipe gpt_oss =
        with_experts(recipe("gpt-oss", neox, frame(),
                            attention() + output_bias_of_attention(presence::required) + sinks +
                                ffn_norm("post_attention_norm.weight") + unscaled(experts()) + expert_biases(),
                            read_gpt_oss),
                     gating_kind::softmax_of_chosen, r::always);
    gpt_oss.activation = activation_kind::swiglu_oai;
    return {
        llama,
        mistral3,
        recipe("qwen2", neox, frame() + output_bias, attention() + ffn_norm() + unscaled(gated()), nullptr),
        recipe("qwen3", neox, frame() + classifier_of_one(), normed + gated(), read_qwen3),
        with_experts(recipe("qwen3moe", neox, frame(), normed + experts(), nullptr), softmax, r::always),
        recipe("qwen2vl", neox, frame() + unused_bias, attention() + ffn_norm() + unscaled(gated()), read_qwen2vl),
        recipe("qwen3vl", neox, frame() + classifier_of_one(), normed + unscaled(gated()), read_qwen3vl),
        with_experts(recipe("qwen3vlmoe", neox, frame(), normed + unscaled(experts()), read_qwen3vlmoe), softmax, r::always),
        // its files may name experts that they haven't
        with_experts(recipe("paddleocr", neox, frame(),
                            attention() + output_bias_of_attention(presence::optional) + ffn_norm() + unscaled(gated()),
                            read_qwen2vl),
                     softmax, r::beside),
        phi3,
        gpt_oss,
    };
}

} // namespace kvg
