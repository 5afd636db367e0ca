// Recipes of models whose layers attend and feed forward.
#include <cmath>

#include "model/recipes.h"

namespace kvg {

namespace {

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
    // of models that rank texts; what they generate doesn't use it
    const auto classifier = tensors{vector_of("cls.output.weight", role::count, extent::embd, presence::ignored)};
    const auto sinks = tensors{vector_of("attn_sinks.weight", role::sinks, extent::heads, presence::required)};
    constexpr auto rms = norm_kind::rms;
    constexpr auto swiglu = activation_kind::swiglu;
    constexpr auto softmax = gating_kind::softmax;
    using r = arch_recipe;
    const auto llama =
        attention() + output_bias_of_attention(presence::optional) + ffn_norm() + gated() + gated_biases() + experts();
    return {
        // Llama 1-3, Mistral, Mixtral, TinyLlama, SmolLM, ...
        {"llama", GGML_ROPE_TYPE_NORMAL, rms, swiglu, softmax, r::allowed, rope_factors::of_model, false, false, frame(), llama,
         nullptr},
        {"mistral3", GGML_ROPE_TYPE_NORMAL, rms, swiglu, softmax, r::allowed, rope_factors::of_model, false, false, frame(),
         llama, read_mistral3},
        {"qwen2", GGML_ROPE_TYPE_NEOX, rms, swiglu, softmax, r::none, rope_factors::none, false, false, frame() + output_bias,
         attention() + ffn_norm() + with_scales(scale::ignored, gated()), nullptr},
        {"qwen3", GGML_ROPE_TYPE_NEOX, rms, swiglu, softmax, r::none, rope_factors::none, false, false, frame() + classifier,
         attention() + head_norms() + ffn_norm() + gated(), nullptr},
        {"qwen3moe", GGML_ROPE_TYPE_NEOX, rms, swiglu, softmax, r::always, rope_factors::none, false, false, frame(),
         attention() + head_norms() + ffn_norm() + experts(), nullptr},
        // its files name a window, which libllama doesn't use either: they don't say it right (llama.cpp #13676)
        {"phi3", GGML_ROPE_TYPE_NEOX, rms, swiglu, softmax, r::none, rope_factors::by_length, true, false, frame(),
         attention() + ffn_norm() + with_scales(scale::ignored, gated_in_one()), nullptr},
        {"gpt-oss", GGML_ROPE_TYPE_NEOX, rms, activation_kind::swiglu_oai, gating_kind::softmax_of_chosen, r::always,
         rope_factors::none, false, false, frame(),
         attention() + output_bias_of_attention(presence::required) + sinks + ffn_norm("post_attention_norm.weight") +
             with_scales(scale::ignored, experts()) + expert_biases(),
         read_gpt_oss},
    };
}

} // namespace kvg
