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
    rotate_in_windows(h);
}

// Embeddings of positions, and no rope.
void read_gpt2(const metadata &, hparams & h) {
    h.learned_positions = true;
    for (layer_spec & layer : h.layers) {
        layer.rope.n_rot = 0;
    }
}

void read_bloom(const metadata &, hparams & h) { tell_distances(h, 8.0f); }

void read_jais(const metadata & in, hparams & h) {
    tell_distances(h, in.optional_number("attention.max_alibi_bias", 0.0f, 0.0f, 1e3f));
    for (layer_spec & layer : h.layers) {
        layer.scale = 1.0f / static_cast<float>(layer.head_dim_k);
    }
}

void read_clamp(const metadata & in, hparams & h) {
    for (layer_spec & layer : h.layers) {
        layer.clamp_qkv = in.optional_number("attention.clamp_kqv", 0.0f, 0.0f, 1e6f);
    }
}

void read_mpt(const metadata & in, hparams & h) {
    tell_distances(h, in.optional_number("attention.max_alibi_bias", 0.0f, 0.0f, 1e3f));
    read_clamp(in, h);
    h.learned_positions = in.file().find_tensor("position_embd.weight") != nullptr;
}

void read_olmo(const metadata & in, hparams & h) {
    read_clamp(in, h);
    h.bare_norms = true;
}

void read_dbrx(const metadata & in, hparams & h) {
    require_experts(in, h);
    read_clamp(in, h);
}

arch_recipe with_layer_norm(const char * name, int rope_mode, const tensors & frame, const tensors & layer,
                            activation_kind activation, void (*read)(const metadata & in, hparams & h)) {
    arch_recipe r = recipe(name, rope_mode, frame, layer, read);
    r.norm = norm_kind::layer;
    r.activation = activation;
    r.partial_rope = true;
    return r;
}

// Whole heads are rotated, or nothing is.
arch_recipe of_whole_heads(arch_recipe r) {
    r.partial_rope = false;
    return r;
}

tensors learned_positions(presence p) {
    return with_scales(scale::none, {matrix("position_embd.weight", role::position_embd, extent::embd, extent::positions, p)});
}

// MPT's biases, and norms of all of a token's Q and K, may be missing.
arch_recipe mpt() {
    const auto wide = [](const char * name, role r, extent n) { return vector_of(name, r, n, presence::optional); };
    const auto more_norms =
        tensors{wide("attn_q_norm.weight", role::q_norm, extent::q), wide("attn_q_norm.bias", role::q_norm_bias, extent::q),
                wide("attn_k_norm.weight", role::k_norm, extent::k), wide("attn_k_norm.bias", role::k_norm_bias, extent::k)};
    const auto last_bias = tensors{vector_of("output_norm.bias", role::output_norm_bias, extent::embd, presence::optional)};
    const auto layer = attention() + with_presence(presence::optional, attn_norm_bias()) + more_norms +
                       output_bias_of_attention(presence::optional) + ffn_norm() + ffn_norm_bias(presence::optional) +
                       unscaled(ungated());
    return with_layer_norm("mpt", GGML_ROPE_TYPE_NEOX, frame() + last_bias + learned_positions(presence::optional), layer,
                           activation_kind::gelu, read_mpt);
}

// What came before 2024, mostly.
std::vector<arch_recipe> older_recipes() {
    constexpr auto neox = GGML_ROPE_TYPE_NEOX;
    constexpr auto swiglu = activation_kind::swiglu;
    constexpr auto gelu = activation_kind::gelu;
    const auto norms = attn_norm_bias() + ffn_norm() + ffn_norm_bias();
    const auto biased = attention() + norms + output_bias_of_attention(presence::required);
    const auto first_norm = tensors{vector_of("token_embd_norm.weight", role::embd_norm, extent::embd, presence::required),
                                    vector_of("token_embd_norm.bias", role::embd_norm_bias, extent::embd, presence::required)};
    const auto last_bias = tensors{vector_of("output_norm.bias", role::output_norm_bias, extent::embd, presence::required)};
    const auto bare_frame = with_scales(
        scale::none, {matrix("token_embd.weight", role::token_embd, extent::embd, extent::vocab, presence::required),
                      matrix("output.weight", role::output, extent::embd, extent::vocab, presence::optional)});
    const auto mixed = attention() + ffn_norm("attn_output_norm.weight") + unscaled(experts());
    return {
        with_layer_norm("starcoder", neox, frame_with_biases() + learned_positions(presence::required),
                        biased + unscaled(ungated()), gelu, read_gpt2),
        with_layer_norm("bloom", neox, frame_with_biases() + first_norm, biased + unscaled(ungated()), gelu, read_bloom),
        with_layer_norm("jais", neox, frame_untied() + last_bias, biased + unscaled(gated()) + gated_biases(), swiglu,
                        read_jais),
        mpt(),
        of_whole_heads(with_layer_norm("jais2", neox, frame_with_biases(), biased + unscaled(ungated()),
                                       activation_kind::relu_sqr, nullptr)),
        of_whole_heads(with_layer_norm("orion", neox, frame_untied() + last_bias, attention() + norms + unscaled(gated()),
                                       swiglu, nullptr)),
        of_whole_heads(
            with_layer_norm("codeshell", neox, frame_untied() + last_bias, biased + unscaled(ungated()), gelu, nullptr)),
        of_whole_heads(
            with_layer_norm("olmo", GGML_ROPE_TYPE_NORMAL, bare_frame, projections() + unscaled(gated()), swiglu, read_olmo)),
        with_experts(of_whole_heads(with_layer_norm("dbrx", neox, frame_untied(), mixed, swiglu, read_dbrx)),
                     gating_kind::softmax, arch_recipe::allowed),
    };
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
    const std::vector<arch_recipe> newer = {
        with_layer_norm("falcon", neox, frame_with_biases(), normed + norm_of_attention + unscaled(ungated_without_biases()),
                        gelu, read_falcon),
        with_layer_norm("gpt2", normal, frame_with_biases() + learned_positions(presence::required),
                        normed + output_bias + norms + unscaled(ungated()), gelu, read_gpt2),
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
    std::vector<arch_recipe> all = older_recipes();
    all.insert(all.end(), newer.begin(), newer.end());
    return all;
}

} // namespace kvg
