#include "model/arch.h"

#include <cmath>

#include "error.h"

namespace kvg {

namespace {

using tensors = std::vector<tensor_spec>;

constexpr extent one = extent::one;

tensors operator+(tensors a, const tensors & b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

tensor_spec vector_of(const char * name, role r, extent n, presence p, with layers = with::any) {
    return {name, r, {n, one, one}, p, layers};
}

tensor_spec matrix(const char * name, role r, extent in, extent out, presence p, with layers = with::any) {
    return {name, r, {in, out, one}, p, layers, scale::applied};
}

tensor_spec cube(const char * name, role r, extent in, extent out) {
    return {name, r, {in, out, extent::expert}, presence::required, with::experts, scale::applied};
}

tensors with_scales(scale how, tensors all) {
    for (tensor_spec & t : all) {
        t.scale = t.scale == scale::none ? scale::none : how;
    }
    return all;
}

// Embedding and output, tied where there is no matrix for the output.
tensors frame() {
    const tensors all = {
        matrix("token_embd.weight", role::token_embd, extent::embd, extent::vocab, presence::required),
        vector_of("output_norm.weight", role::output_norm, extent::embd, presence::required),
        matrix("output.weight", role::output, extent::embd, extent::vocab, presence::optional),
    };
    return with_scales(scale::none, all);
}

tensors attention() {
    return {
        vector_of("attn_norm.weight", role::attn_norm, extent::embd, presence::required),
        matrix("attn_qkv.weight", role::wqkv, extent::embd, extent::qkv, presence::optional),
        matrix("attn_q.weight", role::wq, extent::embd, extent::q, presence::unless_fused),
        matrix("attn_k.weight", role::wk, extent::embd, extent::k, presence::unless_fused),
        matrix("attn_v.weight", role::wv, extent::embd, extent::v, presence::unless_fused),
        matrix("attn_output.weight", role::wo, extent::out, extent::embd, presence::required),
        vector_of("attn_qkv.bias", role::wqkv_bias, extent::qkv, presence::optional),
        vector_of("attn_q.bias", role::wq_bias, extent::q, presence::optional),
        vector_of("attn_k.bias", role::wk_bias, extent::k, presence::optional),
        vector_of("attn_v.bias", role::wv_bias, extent::v, presence::optional),
    };
}

tensors output_bias_of_attention(presence p) { return {vector_of("attn_output.bias", role::wo_bias, extent::embd, p)}; }

tensors head_norms() {
    return {
        vector_of("attn_q_norm.weight", role::q_norm, extent::head_k, presence::required),
        vector_of("attn_k_norm.weight", role::k_norm, extent::head_k, presence::required),
    };
}

tensors post_norms() {
    return {
        vector_of("post_attention_norm.weight", role::attn_post_norm, extent::embd, presence::required),
        vector_of("post_ffw_norm.weight", role::ffn_post_norm, extent::embd, presence::required),
    };
}

tensors ffn_norm(const char * name = "ffn_norm.weight") {
    return {vector_of(name, role::ffn_norm, extent::embd, presence::required)};
}

tensors gated() {
    return {
        matrix("ffn_gate.weight", role::ffn_gate, extent::embd, extent::ff, presence::required, with::dense),
        matrix("ffn_up.weight", role::ffn_up, extent::embd, extent::ff, presence::required, with::dense),
        matrix("ffn_down.weight", role::ffn_down, extent::ff, extent::embd, presence::required, with::dense),
    };
}

tensors gated_biases() {
    return {
        vector_of("ffn_gate.bias", role::ffn_gate_bias, extent::ff, presence::optional, with::dense),
        vector_of("ffn_up.bias", role::ffn_up_bias, extent::ff, presence::optional, with::dense),
        vector_of("ffn_down.bias", role::ffn_down_bias, extent::embd, presence::optional, with::dense),
    };
}

tensors gated_in_one() {
    return {
        matrix("ffn_up.weight", role::ffn_gate_up, extent::embd, extent::gate_up, presence::required),
        matrix("ffn_down.weight", role::ffn_down, extent::ff, extent::embd, presence::required),
    };
}

tensors experts() {
    return {
        {"ffn_gate_inp.weight", role::router, {extent::embd, extent::expert, one}, presence::required, with::experts},
        cube("ffn_gate_exps.weight", role::expert_gate, extent::embd, extent::expert_ff),
        cube("ffn_up_exps.weight", role::expert_up, extent::embd, extent::expert_ff),
        cube("ffn_down_exps.weight", role::expert_down, extent::expert_ff, extent::embd),
    };
}

tensors expert_biases() {
    const auto bias = [](const char * name, role r, extent n) {
        return tensor_spec{name, r, {n, extent::expert, one}, presence::required, with::experts};
    };
    return {
        vector_of("ffn_gate_inp.bias", role::router_bias, extent::expert, presence::required, with::experts),
        bias("ffn_gate_exps.bias", role::expert_gate_bias, extent::expert_ff),
        bias("ffn_up_exps.bias", role::expert_up_bias, extent::expert_ff),
        bias("ffn_down_exps.bias", role::expert_down_bias, extent::embd),
    };
}

// Layers of the pattern attend to a window, with a rope of their own.
void read_windows(const metadata & in, hparams & h, uint32_t window, uint32_t period, float base, float scale) {
    const std::vector<bool> pattern =
        in.pattern("attention.sliding_window_pattern", h.n_layer()).value_or(all_but_every(period, h.n_layer()));
    base = in.optional_number("rope.freq_base_swa", base, 1e-3f, 1e12f);
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        if (pattern[il]) {
            h.layers[il].window = window;
            h.layers[il].rope.freq_base = base;
            h.layers[il].rope.freq_scale = scale;
        }
    }
}

// Both Gemmas whose files name a model by its number of layers have another scale in one of them.
void scale_by_embedding(hparams & h, uint32_t n_layer) {
    if (h.n_layer() == n_layer) {
        for (layer_spec & layer : h.layers) {
            layer.scale = 1.0f / std::sqrt(static_cast<float>(h.n_embd / h.layers[0].n_head));
        }
    }
}

void read_gemma2(const metadata & in, hparams & h) {
    const uint32_t window = in.optional("attention.sliding_window", 4096, 1, metadata::MAX_POSITION);
    const rope_params rope = h.layers[0].rope;
    read_windows(in, h, window, 2, rope.freq_base, rope.freq_scale);
    for (layer_spec & layer : h.layers) {
        layer.soft_cap = in.optional_number("attn_logit_softcapping", 50.0f, 1e-6f, 1e6f);
    }
    h.final_soft_cap = in.optional_number("final_logit_softcapping", 30.0f, 1e-6f, 1e6f);
    scale_by_embedding(h, 46); // 27B
}

void read_gpt_oss(const metadata & in, hparams & h) {
    const uint32_t window = in.required("attention.sliding_window", 1, metadata::MAX_POSITION);
    const rope_params rope = h.layers[0].rope;
    read_windows(in, h, window, 2, rope.freq_base, rope.freq_scale);
    for (layer_spec & layer : h.layers) {
        layer.sinks = true;
    }
}

void read_gemma3(const metadata & in, hparams & h) {
    const uint32_t window = in.optional("attention.sliding_window", 0, 0, metadata::MAX_POSITION);
    if (window > 0) {
        read_windows(in, h, window, 6, 10000.0f, 1.0f);
    }
    h.final_soft_cap = in.optional_number("final_logit_softcapping", 0.0f, 0.0f, 1e6f);
    scale_by_embedding(h, 62); // 27B
}

std::vector<arch_recipe> make_recipes() {
    const auto output_bias = tensors{vector_of("output.bias", role::output_bias, extent::vocab, presence::optional)};
    // of models that rank texts; what they generate doesn't use it
    const auto classifier = tensors{vector_of("cls.output.weight", role::count, extent::embd, presence::ignored)};
    const auto sinks = tensors{vector_of("attn_sinks.weight", role::sinks, extent::heads, presence::required)};
    constexpr auto rms = norm_kind::rms;
    constexpr auto attend = mixing_kind::attention;
    constexpr auto swiglu = activation_kind::swiglu;
    constexpr auto softmax = gating_kind::softmax;
    using r = arch_recipe;
    return {
        // Llama 1-3, Mistral, Mixtral, TinyLlama, SmolLM, ...
        {"llama", GGML_ROPE_TYPE_NORMAL, rms, attend, swiglu, softmax, r::allowed, rope_factors::of_model, false, false,
         frame(),
         attention() + output_bias_of_attention(presence::optional) + ffn_norm() + gated() + gated_biases() + experts(),
         nullptr},
        {"qwen2", GGML_ROPE_TYPE_NEOX, rms, attend, swiglu, softmax, r::none, rope_factors::none, false, false,
         frame() + output_bias, attention() + ffn_norm() + with_scales(scale::ignored, gated()), nullptr},
        {"qwen3", GGML_ROPE_TYPE_NEOX, rms, attend, swiglu, softmax, r::none, rope_factors::none, false, false,
         frame() + classifier, attention() + head_norms() + ffn_norm() + gated(), nullptr},
        {"qwen3moe", GGML_ROPE_TYPE_NEOX, rms, attend, swiglu, softmax, r::always, rope_factors::none, false, false, frame(),
         attention() + head_norms() + ffn_norm() + experts(), nullptr},
        // its files name a window, which libllama doesn't use either: they don't say it right (llama.cpp #13676)
        {"phi3", GGML_ROPE_TYPE_NEOX, rms, attend, swiglu, softmax, r::none, rope_factors::by_length, true, false, frame(),
         attention() + ffn_norm() + with_scales(scale::ignored, gated_in_one()), nullptr},
        {"gemma2", GGML_ROPE_TYPE_NEOX, rms, attend, activation_kind::geglu, softmax, r::none, rope_factors::none, true, true,
         frame(), attention() + post_norms() + ffn_norm() + with_scales(scale::ignored, gated()), read_gemma2},
        {"gemma3", GGML_ROPE_TYPE_NEOX, rms, attend, activation_kind::geglu, softmax, r::none, rope_factors::none, true, true,
         frame(), attention() + head_norms() + post_norms() + ffn_norm() + with_scales(scale::ignored, gated()), read_gemma3},
        {"gpt-oss", GGML_ROPE_TYPE_NEOX, rms, attend, activation_kind::swiglu_oai, gating_kind::softmax_of_chosen, r::always,
         rope_factors::none, false, false, frame(),
         attention() + output_bias_of_attention(presence::required) + sinks + ffn_norm("post_attention_norm.weight") +
             with_scales(scale::ignored, experts()) + expert_biases(),
         read_gpt_oss},
    };
}

const std::vector<arch_recipe> & recipes() {
    static const std::vector<arch_recipe> all = make_recipes();
    return all;
}

} // namespace

const arch_recipe & find_arch(const std::string & name) {
    std::string known;
    for (const arch_recipe & recipe : recipes()) {
        if (name == recipe.name) {
            return recipe;
        }
        known += std::string(known.empty() ? "" : ", ") + recipe.name;
    }
    fail(KVG_UNSUPPORTED, "architecture '%s' has no recipe yet; there are: %s", name.c_str(), known.c_str());
}

int64_t width(extent e, const hparams & h, const layer_spec * layer) {
    switch (e) {
    case extent::one:
        return 1;
    case extent::embd:
        return h.n_embd;
    case extent::vocab:
        return h.n_vocab;
    case extent::heads:
        return layer->n_head;
    case extent::head_k:
        return layer->head_dim_k;
    case extent::q:
        return layer->q_width();
    case extent::k:
        return layer->k_width();
    case extent::v:
        return layer->v_width();
    case extent::qkv:
        return int64_t{layer->q_width()} + layer->k_width() + layer->v_width();
    case extent::out:
        return layer->out_width();
    case extent::ff:
        return layer->feed_forward.n_ff;
    case extent::gate_up:
        return 2 * int64_t{layer->feed_forward.n_ff};
    case extent::expert:
        return layer->feed_forward.n_expert;
    case extent::expert_ff:
        return layer->feed_forward.n_ff_expert;
    }
    return 0;
}

} // namespace kvg
