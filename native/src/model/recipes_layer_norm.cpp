// Recipes with layer norms, or with biases of norms; many of them feed forward beside attention.
#include "error.h"
#include "model/recipes.h"

namespace kvg {

namespace {

tensors attn_norm_bias() { return {vector_of("attn_norm.bias", role::attn_norm_bias, extent::embd, presence::required)}; }

tensors ffn_norm_bias(presence p = presence::required) {
    return {vector_of("ffn_norm.bias", role::ffn_norm_bias, extent::embd, p)};
}

tensors frame_with_biases() {
    return frame() + tensors{vector_of("output_norm.bias", role::output_norm_bias, extent::embd, presence::required)};
}

// Each head has a norm of its own.
tensors norms_by_head() {
    const auto norm_of = [](const char * name, role r, extent n_head) {
        return tensor_spec{name, r, {extent::head_k, n_head, one}, presence::optional};
    };
    return {norm_of("attn_q_norm.weight", role::q_norm, extent::heads),
            norm_of("attn_k_norm.weight", role::k_norm, extent::heads_kv)};
}

void feed_beside_attention(hparams & h) {
    for (layer_spec & layer : h.layers) {
        layer.parallel = true;
    }
}

void read_phi2(const metadata &, hparams & h) { feed_beside_attention(h); }

void read_falcon(const metadata &, hparams & h) { feed_beside_attention(h); }

void read_gptneox(const metadata & in, hparams & h) {
    const auto parallel = in.flag("use_parallel_residual");
    if (!parallel) {
        fail(KVG_MODEL_LOAD, "%s: '%s.use_parallel_residual' is missing", in.file().path().c_str(), h.arch.c_str());
    }
    if (*parallel) {
        feed_beside_attention(h);
    }
}

void read_stablelm(const metadata & in, hparams & h) {
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        h.layers[il].parallel = !in.file().find_tensor(strformat("blk.%u.ffn_norm.weight", il));
    }
}

void read_command_r(const metadata & in, hparams & h) {
    feed_beside_attention(h);
    const float scale = in.optional_number("logit_scale", 0.0f, 0.0f, 1e6f);
    h.logit_scale = scale > 0.0f ? scale : 1.0f;
}

// Layers without a window rotate nothing.
void read_cohere2(const metadata & in, hparams & h) {
    read_command_r(in, h);
    read_windows_of_one_base(in, h, in.required("attention.sliding_window", 1, metadata::MAX_POSITION),
                             h.layers[0].rope.freq_scale);
    for (layer_spec & layer : h.layers) {
        layer.rope.n_rot = layer.window > 0 ? layer.rope.n_rot : 0;
    }
}

// Embeddings of positions, and no rope.
void read_gpt2(const metadata &, hparams & h) {
    h.learned_positions = true;
    for (layer_spec & layer : h.layers) {
        layer.rope.n_rot = 0;
    }
}

arch_recipe with_layer_norm(const char * name, int rope_mode, const tensors & frame, const tensors & layer,
                            activation_kind activation, void (*read)(const metadata & in, hparams & h)) {
    arch_recipe r = recipe(name, rope_mode, frame, layer, read);
    r.norm = norm_kind::layer;
    r.activation = activation;
    r.partial_rope = true;
    return r;
}

} // namespace

std::vector<arch_recipe> layer_norm_recipes() {
    constexpr auto neox = GGML_ROPE_TYPE_NEOX;
    constexpr auto normal = GGML_ROPE_TYPE_NORMAL;
    constexpr auto swiglu = activation_kind::swiglu;
    constexpr auto gelu = activation_kind::gelu;
    const auto logits_bias = tensors{vector_of("output.bias", role::output_bias, extent::vocab, presence::required)};
    const auto normed = attention() + attn_norm_bias();
    const auto output_bias = output_bias_of_attention(presence::required);
    const auto norms = ffn_norm() + ffn_norm_bias();
    const auto optional_norms = tensors{vector_of("ffn_norm.weight", role::ffn_norm, extent::embd, presence::optional)} +
                                ffn_norm_bias(presence::optional);
    arch_recipe phimoe = with_experts(recipe("phimoe", neox, frame_with_biases() + logits_bias,
                                             normed + output_bias + norms + unscaled(experts()), require_experts),
                                      gating_kind::softmax, arch_recipe::allowed);
    phimoe.rope_factors = rope_factors::by_length;
    // the 40B has a norm for attention and another for the feed-forward
    const auto norm_of_attention = tensors{
        vector_of("attn_norm_2.weight", role::mix_norm, extent::embd, presence::optional),
        vector_of("attn_norm_2.bias", role::mix_norm_bias, extent::embd, presence::optional),
    };
    const auto positions =
        with_scales(scale::none,
                    {matrix("position_embd.weight", role::position_embd, extent::embd, extent::positions, presence::required)});
    return {
        with_layer_norm("falcon", neox, frame_with_biases(), normed + norm_of_attention + unscaled(ungated_without_biases()),
                        gelu, read_falcon),
        with_layer_norm("gpt2", normal, frame_with_biases() + positions, normed + output_bias + norms + unscaled(ungated()),
                        gelu, read_gpt2),
        with_layer_norm("command-r", normal, frame(), attention() + norms_by_head() + unscaled(gated()), swiglu,
                        read_command_r),
        with_layer_norm("cohere2", normal, frame(), attention() + gated(), swiglu, read_cohere2),
        with_layer_norm("phi2", neox, frame_with_biases() + logits_bias, normed + output_bias + unscaled(ungated()), gelu,
                        read_phi2),
        phimoe,
        with_layer_norm("stablelm", neox, frame_with_biases(), normed + norms_by_head() + optional_norms + unscaled(gated()),
                        swiglu, read_stablelm),
        with_layer_norm("starcoder2", neox, frame_with_biases(), normed + output_bias + norms + unscaled(ungated()), gelu,
                        nullptr),
        with_layer_norm("nemotron", neox, frame_with_biases(),
                        normed + output_bias_of_attention(presence::optional) + norms + unscaled(ungated()),
                        activation_kind::relu_sqr, nullptr),
        with_layer_norm("gptneox", neox, frame_with_biases(), normed + output_bias + norms + unscaled(ungated()), gelu,
                        read_gptneox),
    };
}

} // namespace kvg
