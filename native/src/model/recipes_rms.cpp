// Recipes with RMS norms: what differs is where norms are, which layers rotate, and what is scaled.
#include <algorithm>
#include <cmath>

#include "error.h"
#include "model/recipes.h"

namespace kvg {

namespace {

void read_smollm3(const metadata &, hparams & h) {
    for (uint32_t il = 3; il < h.n_layer(); il += 4) {
        h.layers[il].rope.n_rot = 0;
    }
}

void read_olmoe(const metadata & in, hparams & h) {
    require_experts(in, h);
    for (layer_spec & layer : h.layers) {
        layer.feed_forward.sums_to_1 = false;
    }
}

void read_qwen2moe(const metadata & in, hparams & h) {
    const std::vector<uint32_t> n_ff =
        in.optional_per_layer("feed_forward_length", std::vector<uint32_t>(h.n_layer(), 0), 0, metadata::MAX_WIDTH * 4);
    const uint32_t n_shared = in.optional("expert_shared_feed_forward_length", 0, 0, metadata::MAX_WIDTH * 4);
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        feed_forward_spec & ff = h.layers[il].feed_forward;
        ff.sums_to_1 = false;
        ff.n_ff_shared = n_shared > 0 ? n_shared : n_ff[il];
    }
}

// OLMo 3, Mellum: layers with a window have an unscaled rope.
void read_olmo2(const metadata & in, hparams & h) {
    const uint32_t window = in.optional("attention.sliding_window", 0, 0, metadata::MAX_POSITION);
    if (window == 0) {
        return;
    }
    read_windows_of_one_base(in, h, window, 1.0f);
    for (layer_spec & layer : h.layers) {
        if (layer.window > 0) {
            layer.rope.yarn = 0.0f;
            layer.rope.attn_factor = 1.0f;
        }
    }
}

// The largest has windows, and rotates nothing in its other layers.
void read_exaone4(const metadata & in, hparams & h) {
    if (h.n_layer() - in.optional("nextn_predict_layers", 0, 0, h.n_layer() - 1) != 64) {
        return;
    }
    const uint32_t window = in.optional("attention.sliding_window", 4096, 1, metadata::MAX_POSITION);
    read_windows_of_one_base(in, h, window, h.layers[0].rope.freq_scale);
    rotate_in_windows(h);
}

// The norms of queries and K come behind rope.
void read_hunyuan(const metadata &, hparams & h) {
    for (layer_spec & layer : h.layers) {
        layer.norm_last = true;
    }
}

// A longer context by a larger base ("NTK-aware"). Sections of rope, which files may name, say nothing of texts.
void read_hunyuan_dense(const metadata & in, hparams & h) {
    read_hunyuan(in, h);
    const float alpha = in.optional_number("rope.scaling.alpha", 0.0f, 0.0f, 1e6f);
    for (layer_spec & layer : h.layers) {
        const auto dim = static_cast<float>(layer.head_dim_k);
        layer.rope.freq_base *= alpha > 0.0f && dim > 2.0f ? std::pow(alpha, dim / (dim - 2.0f)) : 1.0f;
    }
}

void read_hunyuan_moe(const metadata & in, hparams & h) {
    read_hunyuan(in, h);
    require_experts(in, h);
    read_shared_expert(in, h, h.layers[0].feed_forward.n_ff_expert);
    for (layer_spec & layer : h.layers) { // 0: as if the key were not there
        feed_forward_spec & ff = layer.feed_forward;
        ff.n_ff_shared = ff.n_ff_shared > 0 ? ff.n_ff_shared : ff.n_ff_expert;
    }
}

void read_apertus(const metadata & in, hparams & h) {
    const auto numbers = [&](const char * key) { // without the architecture's name
        const auto found = in.file().get_floats(key, h.n_layer());
        if (!found) {
            fail(KVG_MODEL_LOAD, "%s: key '%s' is missing", in.file().path().c_str(), key);
        }
        return std::vector<float>(found->begin(), found->end());
    };
    const std::vector<float> alpha_n = numbers("xielu.alpha_n");
    const std::vector<float> alpha_p = numbers("xielu.alpha_p");
    const std::vector<float> beta = numbers("xielu.beta");
    const std::vector<float> eps = numbers("xielu.eps");
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        h.layers[il].feed_forward.xielu = {alpha_n[il], alpha_p[il], beta[il], eps[il]};
    }
}

// And a shared expert.
void read_granite_scales(const metadata & in, hparams & h) {
    const auto factor = [&](const char * key, float fallback) {
        const float given = in.optional_number(key, 0.0f, 0.0f, 1e6f); // 0: as if it were not there
        return given == 0.0f ? fallback : given;
    };
    h.logit_scale = 1.0f / factor("logit_scale", 1.0f);
    h.residual_scale = factor("residual_scale", 1.0f);
    h.embedding_scale = factor("embedding_scale", 1.0f);
    for (layer_spec & layer : h.layers) {
        layer.scale = factor("attention.scale", layer.scale);
    }
    read_shared_expert(in, h, 0);
}

} // namespace

void read_granite(const metadata & in, hparams & h) {
    read_granite_scales(in, h);
    const bool rotates = in.flag("rope.scaling.finetuned").value_or(true);
    for (layer_spec & layer : h.layers) {
        layer.rope.n_rot = rotates ? layer.rope.n_rot : 0;
    }
}

// Windows, sinks, and layers that rotate nothing.
static void read_granite_swa(const metadata & in, hparams & h) {
    read_granite_scales(in, h);
    require_array(in, h, "attention.sliding_window_pattern");
    const uint32_t window = in.required("attention.sliding_window", 1, metadata::MAX_POSITION);
    read_windows_of_one_base(in, h, window, h.layers[0].rope.freq_scale);
    const bool any_pattern = in.is_array("attention.rope_pattern");
    const std::vector<bool> rotates =
        any_pattern ? *in.pattern("attention.rope_pattern", h.n_layer()) : std::vector<bool>(h.n_layer(), true);
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        h.layers[il].rope.n_rot = rotates[il] ? h.layers[il].rope.n_rot : 0;
        h.layers[il].sinks = true;
    }
}

static arch_recipe granite_swa() {
    constexpr auto layers = with::shared_expert;
    const auto shared = tensors{
        matrix("ffn_up_shexp.weight", role::shared_gate_up, extent::embd, extent::shared_gate_up, presence::required, layers),
        matrix("ffn_down_shexp.weight", role::shared_down, extent::shared_ff, extent::embd, presence::required, layers)};
    const auto sinks = tensors{vector_of("attn_sinks.weight", role::sinks, extent::heads, presence::required)};
    const auto layer = attention() + output_bias_of_attention(presence::optional) + sinks + ffn_norm() + unscaled(gated()) +
                       gated_biases() + unscaled(fused_experts() + shared);
    arch_recipe r = with_experts(recipe("granite_swa", GGML_ROPE_TYPE_NORMAL, frame(), layer, read_granite_swa),
                                 gating_kind::softmax, arch_recipe::allowed);
    r.rope_factors = rope_factors::of_model;
    return r;
}

static arch_recipe apertus() {
    // its norms may have biases, which libllama doesn't add
    const auto unused_biases = tensors{
        vector_of("attn_q_norm.bias", role::count, extent::head_k, presence::ignored),
        vector_of("attn_k_norm.bias", role::count, extent::head_k, presence::ignored),
    };
    arch_recipe r = recipe("apertus", GGML_ROPE_TYPE_NEOX, frame(),
                           attention() + head_norms() + ffn_norm() + unused_biases +
                               output_bias_of_attention(presence::optional) + unscaled(ungated_without_biases()),
                           read_apertus);
    r.activation = activation_kind::xielu;
    r.rope_factors = rope_factors::of_model;
    return r;
}

std::vector<arch_recipe> rms_recipes() {
    constexpr auto neox = GGML_ROPE_TYPE_NEOX;
    constexpr auto normal = GGML_ROPE_TYPE_NORMAL;
    constexpr auto softmax = gating_kind::softmax;
    using r = arch_recipe;
    const auto output_bias = output_bias_of_attention(presence::optional);
    arch_recipe arcee =
        recipe("arcee", normal, frame(), attention() + ffn_norm() + unscaled(ungated_without_biases()), nullptr);
    arcee.activation = activation_kind::relu_sqr;
    arcee.rope_factors = rope_factors::of_model;
    arch_recipe exaone4 =
        recipe("exaone4", neox, frame(), projections() + head_norms() + post_norms() + unscaled(gated()), read_exaone4);
    exaone4.rope_factors = rope_factors::of_model;
    arch_recipe glm4 = recipe("glm4", normal, frame(), attention() + post_norms() + ffn_norm() + unscaled(gated_in_one()),
                              read_sections_of_halves);
    glm4.partial_rope = true;
    const auto granite_layer = attention() + output_bias + ffn_norm() + unscaled(gated()) + gated_biases() +
                               unscaled(experts() + shared_expert(presence::ignored));
    arch_recipe granite = with_experts(recipe("granite", normal, frame(), granite_layer, read_granite), softmax, r::allowed);
    granite.rope_factors = rope_factors::of_model;
    arch_recipe granite_moe = granite;
    granite_moe.name = "granitemoe";
    granite_moe.read = read_granite_scales; // it rotates, whatever its files say
    // its files may name experts that they haven't
    const arch_recipe ernie = with_experts(
        recipe("ernie4_5", normal, frame(),
               attention() + output_bias_of_attention(presence::ignored) + ffn_norm() + unscaled(gated()), nullptr),
        softmax, r::beside);
    const auto normed = attention() + head_norms() + ffn_norm();
    const arch_recipe hunyuan = with_experts(
        recipe("hunyuan-dense", neox, frame(), normed + unscaled(gated()), read_hunyuan_dense), softmax, r::beside);
    const auto mixed = unscaled(experts() + shared_expert(presence::ignored));
    return {
        apertus(),
        hunyuan,
        with_experts(recipe("hunyuan-moe", neox, frame(), normed + mixed, read_hunyuan_moe), softmax, r::allowed),
        with_experts(recipe("qwen2moe", neox, frame(),
                            attention() + ffn_norm() + unscaled(experts() + shared_expert(presence::required)), read_qwen2moe),
                     softmax, r::always),
        recipe("olmo2", neox, frame(), projections() + wide_norms() + post_norms() + unscaled(gated()), read_olmo2),
        with_experts(recipe("olmoe", neox, frame(), attention() + wide_norms() + ffn_norm() + unscaled(experts()), read_olmoe),
                     softmax, r::allowed),
        recipe("smollm3", normal, frame(), attention() + ffn_norm() + unscaled(gated()), read_smollm3),
        recipe("seed_oss", neox, frame(), attention() + ffn_norm("post_attention_norm.weight") + unscaled(gated()), nullptr),
        arcee,
        exaone4,
        glm4,
        granite,
        granite_moe,
        granite_swa(),
        ernie,
        with_experts(recipe("mellum", neox, frame_untied(), normed + experts(), read_olmo2), softmax, r::always),
    };
}

} // namespace kvg
