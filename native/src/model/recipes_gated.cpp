// Recipes of models with a gate behind attention, which a matrix of its own makes.
#include "error.h"
#include "model/recipes.h"

namespace kvg {

namespace {

// What the gate has for each layer: a number for all that heads give.
void gate_all(hparams & h) {
    for (layer_spec & layer : h.layers) {
        layer.n_gate = layer.out_width();
    }
}

// Embeddings are normalized; layers without a window rotate nothing.
void read_muse_glimmer(const metadata & in, hparams & h) {
    gate_all(h);
    const rope_params rope = h.layers[0].rope;
    read_windows(in, h, in.required("attention.sliding_window", 1, metadata::MAX_POSITION), 4, rope.freq_base, 1.0f);
    rotate_in_windows(h);
    h.embd_normed = true;
    h.post_norm_eps = 1e-8f;
    h.logit_scale = in.required_number("logit_scale", 0.0f, 1e6f);
    h.final_soft_cap = in.optional_number("final_logit_softcapping", 0.0f, 0.0f, 1e6f);
}

// Every fourth layer rotates nothing.
void read_afmoe(const metadata & in, hparams & h) {
    gate_all(h);
    const rope_params rope = h.layers[0].rope;
    const uint32_t window = in.required("attention.sliding_window", 1, metadata::MAX_POSITION);
    read_windows(in, h, window, 4, rope.freq_base, rope.freq_scale);
    for (uint32_t il = 3; il < h.n_layer(); il += 4) {
        h.layers[il].rope.n_rot = 0;
    }
    read_gating(in, h, 2);
    read_weights(in, h);
    read_leading_dense(in, h);
    read_shared_count(in, h, 0);
}

// Of heads in layers of windows.
int rotated_in_windows(const metadata & in, const hparams & h) {
    const uint32_t usual = static_cast<uint32_t>(h.layers[0].rope.n_rot);
    const uint32_t n = in.optional("rope.dimension_count_swa", usual, 2, h.layers[0].head_dim_k);
    if (n % 2 != 0) {
        fail(KVG_UNSUPPORTED, "%s: %u rotated dimensions in windows; rope rotates pairs", in.file().path().c_str(), n);
    }
    return static_cast<int>(n);
}

// Layers of windows have a rope of their own.
void read_spark(const metadata & in, hparams & h) {
    const uint32_t window = in.required("attention.sliding_window", 1, metadata::MAX_POSITION);
    require_array(in, h, "attention.sliding_window_pattern");
    const rope_params rope = h.layers[0].rope;
    read_windows(in, h, window, 0, rope.freq_base, rope.freq_scale);
    const int n_rot = rotated_in_windows(in, h);
    for (layer_spec & layer : h.layers) {
        layer.n_gate = layer.n_head;
        layer.rope.n_rot = layer.window > 0 ? n_rot : layer.rope.n_rot;
    }
}

// Layers of windows have an unscaled rope of their own. The matrix says which of the two gates it makes.
void read_laguna(const metadata & in, hparams & h) {
    const uint32_t window = in.optional("attention.sliding_window", 0, 0, metadata::MAX_POSITION);
    const std::vector<bool> windowed = all_but_first_of(in, "attention.sliding_window_pattern", 4, h.n_layer());
    const rope_params first = h.layers[0].rope;
    const float base = in.optional_number("rope.freq_base_swa", first.freq_base, 1e-3f, 1e12f);
    const int n_rot = rotated_in_windows(in, h);
    read_gating(in, h, 2);
    read_weights(in, h);
    read_leading_dense(in, h);
    const uint32_t given = in.optional("expert_shared_feed_forward_length", 0, 0, metadata::MAX_WIDTH * 4);
    const uint64_t n_shared = in.optional("expert_shared_count", 1, 0, 64);
    share(h, [&](uint64_t n_ff) { return given > 0 ? given : n_ff * n_shared; });
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        layer_spec & layer = h.layers[il];
        const gguf_tensor * gate = in.file().find_tensor(strformat("blk.%u.attn_gate.weight", il));
        layer.n_gate = gate && gate->ne[1] == layer.out_width() ? layer.out_width() : layer.n_head;
        layer.gate_softplus = true;
        if (window > 0 && windowed[il]) {
            layer.window = window;
            layer.rope.freq_base = base;
            layer.rope.freq_scale = 1.0f;
            layer.rope.yarn = 0.0f;
            layer.rope.attn_factor = 1.0f;
            layer.rope.n_rot = n_rot;
        }
    }
}

} // namespace

std::vector<arch_recipe> gated_recipes() {
    using r = arch_recipe;
    constexpr auto neox = GGML_ROPE_TYPE_NEOX;
    constexpr auto sigmoid = gating_kind::sigmoid;
    const auto gate =
        unscaled({matrix("attn_gate.weight", role::attn_gate, extent::embd, extent::attn_gate, presence::required)});
    const auto layer = attention() + gate + ffn_norm();
    const auto mixed = unscaled(gated() + experts() + shared_expert(presence::ignored)) + choice_bias(presence::required);
    arch_recipe afmoe = partial(with_experts(
        recipe("afmoe", neox, frame(), layer + head_norms() + post_norms() + mixed, read_afmoe), sigmoid, r::always));
    afmoe.scaled_embedding = true;
    arch_recipe spark = partial(recipe("spark2_5", neox, frame(), layer + unscaled(gated()), read_spark));
    spark.activation = activation_kind::geglu;
    return {
        partial(recipe("muse-glimmer", GGML_ROPE_TYPE_NORMAL, frame_untied(),
                       layer + head_norms() + post_norms() + unscaled(gated()), read_muse_glimmer)),
        afmoe,
        partial(with_experts(recipe("laguna", neox, frame(), layer + head_norms() + mixed, read_laguna), sigmoid, r::always)),
        spark,
    };
}

} // namespace kvg
