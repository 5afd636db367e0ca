// Recipes of models that differ from Llama in a rope, a norm, a scale or a matrix.
#include <cmath>

#include "error.h"
#include "model/recipes.h"

namespace kvg {

namespace {

constexpr auto NEOX = GGML_ROPE_TYPE_NEOX;
constexpr auto NORMAL = GGML_ROPE_TYPE_NORMAL;

// Files give twice the width.
void read_qwen(const metadata &, hparams & h) {
    for (layer_spec & layer : h.layers) {
        layer.feed_forward.n_ff /= 2;
    }
}

void read_plamo(const metadata &, hparams & h) {
    for (layer_spec & layer : h.layers) {
        layer.parallel = true;
    }
}

// The norms of queries and K come behind rope.
void read_maincoder(const metadata &, hparams & h) {
    for (layer_spec & layer : h.layers) {
        layer.norm_last = true;
    }
}

void read_refact(const metadata &, hparams & h) { tell_distances(h, 8.0f); }

// The number of layers says which of the two models it is: the smaller one has a rope, the larger one ALiBi. libllama tells no positions
// in others.
void read_baichuan(const metadata & in, hparams & h) {
    if (h.n_layer() == 40) {
        tell_distances(h, 8.0f);
    } else if (h.n_layer() != 32) {
        fail(KVG_UNSUPPORTED, "%s: %u layers; architecture '%s' has 32 and a rope, or 40 and ALiBi", in.file().path().c_str(),
             h.n_layer(), h.arch.c_str());
    }
}

// Older files have no scales.
void read_minicpm(const metadata & in, hparams & h) {
    const auto factor = [&](const char * key, float fallback) {
        const float given = in.optional_number(key, fallback, 0.0f, 1e6f);
        return given == 0.0f ? 1.0f : given;
    };
    h.embedding_scale = factor("embedding_scale", 12.0f);
    h.residual_scale = factor("residual_scale", 1.4f / std::sqrt(static_cast<float>(h.n_layer())));
    h.logit_scale = 1.0f / factor("logit_scale", 256.0f / static_cast<float>(h.n_embd));
}

// K and V of heads are made of a latent, which cells don't hold.
void read_latent_heads(const metadata & in, hparams & h) {
    const uint32_t rank = in.required("attention.kv_lora_rank", 1, metadata::MAX_WIDTH);
    for (layer_spec & layer : h.layers) {
        const int n_plain = static_cast<int>(layer.head_dim_k) - layer.rope.n_rot;
        if (layer.n_head_kv != layer.n_head || n_plain <= 0 || n_plain % 2 != 0) {
            fail(KVG_UNSUPPORTED, "%s: %u heads on %u of K, of whose %u dimensions %d are rotated", in.file().path().c_str(),
                 layer.n_head, layer.n_head_kv, layer.head_dim_k, layer.rope.n_rot);
        }
        layer.kv_rank = rank;
        layer.rope.offset = n_plain;
    }
}

void read_minicpm3(const metadata & in, hparams & h) {
    read_latent_heads(in, h);
    for (layer_spec & layer : h.layers) {
        layer.latent.q_rank = in.required("attention.q_lora_rank", 1, metadata::MAX_WIDTH);
    }
    h.embedding_scale = 12.0f;
    h.residual_scale = 1.4f / std::sqrt(static_cast<float>(h.n_layer()));
    h.logit_scale = 256.0f / static_cast<float>(h.n_embd);
}

void read_plamo3(const metadata & in, hparams & h) {
    const uint32_t window = in.optional("attention.sliding_window", 0, 0, metadata::MAX_POSITION);
    if (window > 0) {
        read_windows(in, h, window, 8, 10000.0f, 1.0f);
    }
}

// Layers may have a matrix in place of attention, or only feed forward.
void read_deci(const metadata & in, hparams & h) {
    const std::vector<uint32_t> n_head = in.required_per_layer("attention.head_count", h.n_layer(), 0, metadata::MAX_WIDTH);
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        layer_spec & layer = h.layers[il];
        layer.linear = layer.n_head_kv == 0 && n_head[il] > 0;
        if (!layer.feed_forward.feeds()) {
            fail(KVG_UNSUPPORTED, "%s: layer %u doesn't feed forward, and in architecture '%s' each does",
                 in.file().path().c_str(), il, h.arch.c_str());
        }
    }
}

arch_recipe with_factors(arch_recipe r) {
    r.rope_factors = rope_factors::of_model;
    return r;
}

tensors frame_tied() {
    return with_scales(scale::none,
                       {matrix("token_embd.weight", role::token_embd, extent::embd, extent::vocab, presence::required),
                        vector_of("output_norm.weight", role::output_norm, extent::embd, presence::required)});
}

// One matrix makes K and V of all heads.
tensors latent_heads() {
    return {
        {"attn_kv_a_mqa.weight", role::latent_down, {extent::embd, extent::kv_rank_rotated, one}, presence::required},
        vector_of("attn_kv_a_norm.weight", role::latent_norm, extent::kv_rank, presence::required),
        {"attn_kv_b.weight", role::latent_up, {extent::kv_rank, extent::kv_of_latent, one}, presence::required},
        matrix("attn_output.weight", role::wo, extent::out, extent::embd, presence::required),
    };
}

arch_recipe minicpm3() {
    const auto queries = unscaled({
        matrix("attn_q_a.weight", role::q_down, extent::embd, extent::q_rank, presence::required),
        vector_of("attn_q_a_norm.weight", role::q_down_norm, extent::q_rank, presence::required),
        matrix("attn_q_b.weight", role::wq, extent::q_rank, extent::q, presence::required),
    });
    arch_recipe r = partial(recipe("minicpm3", NEOX, frame(),
                                   attn_norm() + queries + latent_heads() + ffn_norm() + unscaled(gated()), read_minicpm3));
    r.rope_factors = rope_factors::by_length;
    return r;
}

// libllama doesn't use its scale.
tensors attention_in_one() {
    return attn_norm() + unscaled({matrix("attn_qkv.weight", role::wqkv, extent::embd, extent::qkv, presence::required)}) +
           tensors{matrix("attn_output.weight", role::wo, extent::out, extent::embd, presence::required)};
}

arch_recipe bitnet() {
    const auto more_norms = tensors{vector_of("attn_sub_norm.weight", role::attn_sub_norm, extent::out, presence::required),
                                    vector_of("ffn_sub_norm.weight", role::ffn_sub_norm, extent::ff, presence::required)};
    return partial(recipe("bitnet", NEOX, frame_tied(), attention() + ffn_norm() + more_norms + gated(), nullptr));
}

arch_recipe openelm() {
    return partial(
        recipe("openelm", NEOX, frame_tied(), attention_in_one() + head_norms() + ffn_norm() + unscaled(gated()), nullptr));
}

// Llama 3 Nemotron
arch_recipe deci() {
    const auto norm_of = [](const char * name, role r, with layers) {
        return vector_of(name, r, extent::embd, presence::required, layers);
    };
    const auto layer =
        tensors{norm_of("attn_norm.weight", role::attn_norm, with::attention),
                norm_of("attn_norm.weight", role::attn_norm, with::linear),
                matrix("attn_output.weight", role::linear, extent::embd, extent::embd, presence::required, with::linear)} +
        only(with::attention, projections() + output_bias_of_attention(presence::optional)) + ffn_norm() + unscaled(gated()) +
        gated_biases();
    arch_recipe r = with_factors(recipe("deci", NORMAL, frame(), layer, read_deci));
    r.attending = arch_recipe::some;
    r.may_only_feed = true;
    return r;
}

arch_recipe plamo3() {
    // their names have no end
    const auto norms = tensors{vector_of("post_attention_norm", role::attn_post_norm, extent::embd, presence::required),
                               vector_of("post_ffw_norm", role::ffn_post_norm, extent::embd, presence::required)};
    return partial(recipe("plamo3", NEOX, frame(),
                          attention_in_one() + head_norms() + norms + ffn_norm() + unscaled(gated_in_one()), read_plamo3));
}

} // namespace

std::vector<arch_recipe> llama_like_recipes() {
    const auto feeds = ffn_norm() + unscaled(gated());
    const auto layer = attention() + feeds;
    const auto output_bias = [](presence p) { return output_bias_of_attention(p); };
    const auto unused_factors = tensors{vector_of("rope_freqs.weight", role::count, extent::pairs, presence::ignored)};
    const auto minicpm_layer = layer + output_bias(presence::optional) + gated_biases() + unscaled(experts());
    return {
        recipe("internlm2", NORMAL, frame_untied(), layer, nullptr),
        recipe("xverse", NORMAL, frame_untied(), layer, nullptr),
        recipe("baichuan", NORMAL, frame_untied(), layer, read_baichuan),
        with_factors(recipe("exaone", NEOX, frame(), layer, nullptr)),
        recipe("pangu-embedded", NEOX, frame() + unused_factors, layer + output_bias(presence::required), nullptr),
        recipe("plamo", NEOX, frame_untied(), attention() + unscaled(gated()), read_plamo),
        recipe("maincoder", NORMAL, frame(), layer + head_norms(), read_maincoder),
        partial(recipe("qwen", NEOX, frame_untied(), layer, read_qwen)),
        partial(recipe("chatglm", NORMAL, frame(), attention() + ffn_norm() + unscaled(gated_in_one()), nullptr)),
        partial(with_factors(recipe("refact", NORMAL, frame(),
                                    layer + output_bias(presence::ignored) + with_presence(presence::ignored, gated_biases()),
                                    read_refact))),
        with_factors(with_experts(recipe("minicpm", NORMAL, frame(), minicpm_layer, read_minicpm), gating_kind::softmax,
                                  arch_recipe::allowed)),
        minicpm3(),
        bitnet(),
        openelm(),
        plamo3(),
        deci(),
    };
}

} // namespace kvg
