// Recipes of models of experts behind a few dense layers.
#include "error.h"
#include "model/recipes.h"

namespace kvg {

namespace {

tensors choice_bias(presence p) {
    return {vector_of("exp_probs_b.bias", role::expert_choice_bias, extent::expert, p, with::experts)};
}

// How a router's numbers become weights, as far as files say it.
void read_gating(const metadata & in, hparams & h, uint32_t fallback) {
    uint32_t gating = in.optional("expert_gating_func", 0, 0, 16);
    gating = gating == 0 ? fallback : gating;
    if (gating != 1 && gating != 2) {
        fail(KVG_UNSUPPORTED, "%s: expert gating function %u; 1 (softmax) and 2 (sigmoid) are supported",
             in.file().path().c_str(), gating);
    }
    for (layer_spec & layer : h.layers) {
        layer.feed_forward.gating = gating == 1 ? gating_kind::softmax : gating_kind::sigmoid;
    }
}

// Whether weights are divided by their sum, and what multiplies them.
void read_weights(const metadata & in, hparams & h) {
    for (layer_spec & layer : h.layers) {
        layer.feed_forward.sums_to_1 = in.flag("expert_weights_norm").value_or(false);
        layer.feed_forward.expert_scale = in.optional_number("expert_weights_scale", 0.0f, 0.0f, 1e6f);
    }
}

// width: of each layer's shared expert, for the width of one of its experts
template <class F> void share(hparams & h, F width) {
    for (layer_spec & layer : h.layers) {
        const uint64_t n = width(layer.feed_forward.n_ff_expert);
        layer.feed_forward.n_ff_shared = layer.feed_forward.n_expert > 0 ? static_cast<uint32_t>(n) : 0;
    }
}

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
    const uint64_t n_shared = in.required("expert_shared_count", 0, 64);
    share(h, [&](uint64_t n_ff) { return n_shared * n_ff; });
}

// Of the layers behind the dense ones, every so many have experts.
void read_ernie_moe(const metadata & in, hparams & h) {
    const uint32_t step = in.required("interleave_moe_layer_step", 1, 1 << 16);
    const uint32_t n_dense = in.optional("leading_dense_block_count", 0, 0, h.n_layer());
    make_dense(in, h, [&](uint32_t il) { return il < n_dense || (il + 1) % step != 0; });
    const uint32_t given = in.optional("expert_shared_feed_forward_length", 0, 0, metadata::MAX_WIDTH * 4);
    share(h, [&](uint64_t) { return given; });
}

} // namespace

std::vector<arch_recipe> expert_recipes() {
    constexpr auto neox = GGML_ROPE_TYPE_NEOX;
    constexpr auto softmax = gating_kind::softmax;
    using r = arch_recipe;
    const auto unscaled = [](tensors all) { return with_scales(scale::ignored, std::move(all)); };
    const auto mixed = unscaled(gated() + experts() + shared_expert(presence::ignored));
    const auto partial = [](arch_recipe row) {
        row.partial_rope = true;
        return row;
    };
    const auto optional_head_norms = tensors{
        vector_of("attn_q_norm.weight", role::q_norm, extent::head_k, presence::optional),
        vector_of("attn_k_norm.weight", role::k_norm, extent::head_k, presence::optional),
    };
    return {
        partial(
            with_experts(recipe("minimax-m2", neox, frame(),
                                attention() + wide_norms() + ffn_norm() + unscaled(experts()) + choice_bias(presence::required),
                                read_minimax_m2),
                         gating_kind::sigmoid, r::allowed)),
        partial(with_experts(recipe("bailingmoe2", neox, frame(),
                                    attention() + head_norms() + ffn_norm() + mixed + choice_bias(presence::optional),
                                    read_bailingmoe2),
                             gating_kind::sigmoid, r::always)),
        partial(with_experts(recipe("glm4moe", neox, frame(),
                                    attention() + optional_head_norms + ffn_norm("post_attention_norm.weight") + mixed +
                                        choice_bias(presence::required),
                                    read_glm4moe),
                             gating_kind::sigmoid, r::always)),
        with_experts(recipe("ernie4_5-moe", GGML_ROPE_TYPE_NORMAL, frame(),
                            attention() + output_bias_of_attention(presence::ignored) + ffn_norm() + mixed +
                                choice_bias(presence::optional),
                            read_ernie_moe),
                     softmax, r::always),
    };
}

} // namespace kvg
