// Recipes of models some or all of whose layers have a state.
#include <algorithm>
#include <cmath>

#include "cpu/recur.h"
#include "error.h"
#include "model/recipes.h"

namespace kvg {

namespace {

constexpr uint64_t MAX_WIDTH = metadata::MAX_WIDTH;

tensors state_in(const char * name, scale s = scale::applied) {
    return with_scales(s, {matrix(name, role::state_in, extent::embd, extent::state_in, presence::required, with::state)});
}

tensors state_out(const char * name, extent in, scale s = scale::applied) {
    return with_scales(s, {matrix(name, role::state_out, in, extent::embd, presence::required, with::state)});
}

tensors taps(const char * name) {
    return {{name, role::taps, {extent::taps, extent::channels, one}, presence::required, with::state}};
}

// A gated delta net's, but what makes its beta and its time step.
tensors delta_net() {
    return state_in("attn_qkv.weight") + taps("ssm_conv1d.weight") + state_out("ssm_out.weight", extent::state_v) +
           tensors{
               matrix("attn_gate.weight", role::state_gate, extent::embd, extent::state_v, presence::required, with::state),
               vector_of("ssm_dt.bias", role::dt_bias, extent::state_heads, presence::required, with::state),
               vector_of("ssm_a", role::state_decay, extent::state_heads, presence::required, with::state),
               vector_of("ssm_norm.weight", role::state_norm, extent::state_dim_v, presence::required, with::state),
           };
}

tensors unless_older(tensors all) {
    for (tensor_spec & t : all) {
        t.presence = t.role == role::state_in || t.role == role::state_gate ? presence::unless_older : t.presence;
    }
    return all;
}

// Kimi delta attention: Q, K and V each have a matrix and a convolution; what decays and what gates come by way of a smaller width.
tensors kimi_delta_net() {
    const auto matrix_of = [](const char * name, role r, extent in, extent out, presence p = presence::required) {
        return matrix(name, r, in, out, p, with::state);
    };
    const auto taps_of = [](const char * name, role r) {
        return tensor_spec{name, r, {extent::taps, one, extent::state_v}, presence::required, with::state};
    };
    const auto unused = [](const char * name) {
        return vector_of(name, role::count, extent::state_v, presence::ignored, with::state);
    };
    const tensors all = {
        matrix_of("attn_qkv.weight", role::state_in, extent::embd, extent::state_in, presence::optional),
        matrix_of("attn_q.weight", role::state_q, extent::embd, extent::state_k, presence::unless_fused),
        matrix_of("attn_k.weight", role::state_k, extent::embd, extent::state_k, presence::unless_fused),
        matrix_of("attn_v.weight", role::state_v, extent::embd, extent::state_v, presence::unless_fused),
        unused("attn_q.bias"),
        unused("attn_k.bias"),
        unused("attn_v.bias"),
        taps_of("ssm_conv1d_q.weight", role::taps_q),
        taps_of("ssm_conv1d_k.weight", role::taps_k),
        taps_of("ssm_conv1d_v.weight", role::taps_v),
        matrix_of("ssm_f_a.weight", role::decay_down, extent::embd, extent::state_dim_k),
        matrix_of("ssm_f_b.weight", role::decay_up, extent::state_dim_k, extent::state_k),
        vector_of("ssm_dt.bias", role::dt_bias, extent::state_k, presence::required, with::state),
        {"ssm_a", role::state_decay, {one, extent::state_heads, one}, presence::required, with::state},
        matrix_of("ssm_beta.weight", role::state_beta, extent::embd, extent::state_heads),
        matrix_of("ssm_g_a.weight", role::gate_down, extent::embd, extent::state_dim_v),
        matrix_of("ssm_g_b.weight", role::gate_up, extent::state_dim_v, extent::state_v),
        vector_of("ssm_norm.weight", role::state_norm, extent::state_dim_v, presence::required, with::state),
        matrix_of("attn_output.weight", role::state_out, extent::state_v, extent::embd),
    };
    return unscaled(all);
}

tensors mamba2(presence norm) {
    const auto by_heads = [](const char * name, role r) {
        return tensor_spec{name, r, {one, extent::state_heads, one}, presence::required, with::state};
    };
    return state_in("ssm_in.weight") + taps("ssm_conv1d.weight") + state_out("ssm_out.weight", extent::state_v) +
           tensors{
               vector_of("ssm_conv1d.bias", role::taps_bias, extent::channels, presence::optional, with::state),
               vector_of("ssm_dt.bias", role::dt_bias, extent::state_heads, presence::required, with::state),
               by_heads("ssm_a", role::state_decay),
               by_heads("ssm_d", role::state_skip),
               {"ssm_norm.weight", role::state_norm, {extent::state_group, extent::state_groups, one}, norm, with::state},
           };
}

// Nemotron 3's: none has a gate.
tensors latent_experts() {
    const auto latent = [](const char * name, role r, extent in, extent out) {
        return tensor_spec{name, r, {in, out, one}, presence::optional, with::experts};
    };
    tensors all = experts_without_gates();
    for (tensor_spec & t : all) {
        if (t.role == role::expert_up) {
            t.shape = {extent::expert_in, extent::expert_ff, extent::expert};
        } else if (t.role == role::expert_down) {
            t.shape = {extent::expert_ff, extent::expert_in, extent::expert};
        }
    }
    constexpr auto shared = with::shared_expert;
    return all +
           tensors{
               latent("ffn_latent_down.weight", role::expert_latent_down, extent::embd, extent::expert_in),
               latent("ffn_latent_up.weight", role::expert_latent_up, extent::expert_in, extent::embd),
               matrix("ffn_up_shexp.weight", role::shared_up, extent::embd, extent::shared_ff, presence::required, shared),
               matrix("ffn_down_shexp.weight", role::shared_down, extent::shared_ff, extent::embd, presence::required, shared),
           };
}

// What both recurrences have, before their own check of it.
state_spec read_ssm(const metadata & in, state_kind kind) {
    state_spec s = {};
    s.kind = kind;
    s.n_taps = in.required("ssm.conv_kernel", 2, RECUR_TAPS);
    s.n_head = in.required("ssm.time_step_rank", 1, MAX_WIDTH);
    s.n_head_k = in.required("ssm.group_count", 1, MAX_WIDTH);
    s.head_dim_k = in.required("ssm.state_size", 1, 4096);
    const uint32_t v_width = in.required("ssm.inner_size", 1, MAX_WIDTH);
    const char * path = in.file().path().c_str();
    if (v_width % s.n_head != 0 || s.n_head % s.n_head_k != 0) {
        fail(KVG_MODEL_LOAD, "%s: a state of %u values, %u heads and %u groups: they don't divide each other", path, v_width,
             s.n_head, s.n_head_k);
    }
    s.head_dim_v = v_width / s.n_head;
    const uint64_t n_channels = uint64_t{v_width} + 2 * uint64_t{s.n_head_k} * s.head_dim_k;
    if (n_channels > 4 * MAX_WIDTH || s.head_dim_v > 4096) {
        fail(KVG_MODEL_LOAD, "%s: states of %u heads, %u by %u, are more than any model has", path, s.n_head, s.head_dim_k,
             s.head_dim_v);
    }
    if (s.head_dim_k % 4 != 0 || s.head_dim_v % RECUR_ROWS != 0) {
        fail(KVG_UNSUPPORTED, "%s: heads of a state of %u by %u; they must be multiples of 4", path, s.head_dim_k,
             s.head_dim_v);
    }
    s.n_channels = static_cast<uint32_t>(n_channels);
    return s;
}

// Which layers of a delta net's model don't attend: a list, or all but every so many.
std::vector<bool> recurrent_layers(const metadata & in, const hparams & h) {
    return in.pattern("attention.recurrent_layers", h.n_layer())
        .value_or(all_but_every(in.optional("full_attention_interval", 4, 1, MAX_WIDTH), h.n_layer()));
}

void make_recurrent(layer_spec & layer, const state_spec & state) {
    layer.state = state;
    layer.n_head = layer.n_head_kv = 0;
    layer.gated = false;
}

void read_delta_net(const metadata & in, hparams & h, bool in_turn) {
    state_spec state = read_ssm(in, state_kind::delta_net);
    state.in_turn = in_turn;
    if (state.head_dim_v != state.head_dim_k) {
        fail(KVG_UNSUPPORTED, "%s: a state's heads are %u by %u; architecture '%s' has square ones", in.file().path().c_str(),
             state.head_dim_k, state.head_dim_v, h.arch.c_str());
    }
    const std::vector<bool> recurrent = recurrent_layers(in, h);
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        h.layers[il].gated = true;
        if (recurrent[il] && !h.is_draft_head(il)) {
            make_recurrent(h.layers[il], state);
        }
    }
}

void read_qwen35(const metadata & in, hparams & h) {
    require_sections_in_turn(in, h);
    read_delta_net(in, h, true);
}

void read_qwen35moe(const metadata & in, hparams & h) {
    read_qwen35(in, h);
    read_shared_expert(in, h, h.layers[0].feed_forward.n_ff_expert);
}

void read_qwen3next(const metadata & in, hparams & h) {
    read_delta_net(in, h, false);
    read_shared_expert(in, h, h.layers[0].feed_forward.n_ff_expert);
}

void read_lfm2(const metadata & in, hparams & h) {
    state_spec state = {};
    state.kind = state_kind::short_conv;
    state.n_taps = in.required("shortconv.l_cache", 2, RECUR_TAPS);
    state.n_channels = h.n_embd;
    if (h.n_embd % 4 != 0) {
        fail(KVG_UNSUPPORTED, "%s: %u channels of a convolution; they must be a multiple of 4", in.file().path().c_str(),
             h.n_embd);
    }
    const uint32_t window = in.optional("attention.sliding_window", 0, 0, metadata::MAX_POSITION);
    for (layer_spec & layer : h.layers) {
        if (layer.n_head_kv == 0) {
            make_recurrent(layer, state);
        } else {
            layer.window = window;
        }
    }
}

void read_lfm2moe(const metadata & in, hparams & h) {
    read_lfm2(in, h);
    read_leading_dense(in, h);
    const uint32_t gating = in.required("expert_gating_func", 0, 16);
    if (gating != 2) {
        fail(KVG_UNSUPPORTED, "%s: expert gating function %u; architecture '%s' has 2, sigmoid", in.file().path().c_str(),
             gating, h.arch.c_str());
    }
}

state_spec read_kimi_state(const metadata & in, const hparams & h) {
    state_spec s = {};
    s.kind = state_kind::delta_net;
    s.decays_by_width = true;
    s.n_taps = in.required("ssm.conv_kernel", 2, RECUR_TAPS);
    s.n_head = s.n_head_k = in.required_per_layer("attention.head_count", h.n_layer(), 0, MAX_WIDTH).front();
    s.head_dim_k = s.head_dim_v = in.required("kda.head_dim", 1, 4096);
    if (s.n_head == 0 || uint64_t{s.n_head} * s.head_dim_k > MAX_WIDTH || s.head_dim_k % 4 != 0) {
        fail(KVG_UNSUPPORTED, "%s: %u heads of a state of %u by %u; there must be some, and multiples of 4",
             in.file().path().c_str(), s.n_head, s.head_dim_k, s.head_dim_k);
    }
    s.n_channels = 3 * s.v_width();
    return s;
}

void read_kimi_linear(const metadata & in, hparams & h) {
    const state_spec state = read_kimi_state(in, h);
    const uint32_t n_dense = in.optional("leading_dense_block_count", 0, 0, h.n_layer());
    const std::vector<uint32_t> n_ff = in.required_per_layer("feed_forward_length", h.n_layer(), 1, MAX_WIDTH * 4);
    const uint32_t n_shared = std::max(1u, in.required("expert_shared_count", 0, 64));
    const float expert_scale = in.optional_number("expert_weights_scale", 0.0f, 0.0f, 1e6f);
    const uint32_t gating = in.required("expert_gating_func", 0, 16);
    if (gating != 2) {
        fail(KVG_UNSUPPORTED, "%s: expert gating function %u; architecture '%s' has 2, sigmoid", in.file().path().c_str(),
             gating, h.arch.c_str());
    }
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        layer_spec & layer = h.layers[il];
        if (layer.n_head_kv == 0) {
            make_recurrent(layer, state);
            layer.rope.n_rot = 0;
        } else {
            read_latent(in, layer);
            layer.rope.n_rot = 0; // nothing is rotated
        }
        feed_forward_spec & ff = layer.feed_forward;
        if (il < n_dense) {
            ff.n_expert = 0;
            ff.n_ff = n_ff[il];
        } else {
            ff.n_ff_shared = ff.n_ff_expert * n_shared;
            ff.expert_scale = expert_scale;
        }
    }
}

// Layers without KV heads have a Mamba-2 state.
void read_mamba_layers(const metadata & in, hparams & h) {
    const state_spec state = read_ssm(in, state_kind::mamba2);
    for (layer_spec & layer : h.layers) {
        if (layer.n_head_kv == 0) {
            make_recurrent(layer, state);
        }
    }
}

void read_granite_hybrid(const metadata & in, hparams & h) {
    read_mamba_layers(in, h);
    read_granite(in, h);
}

// A draft head attends and has experts.
bool has_nemotron_draft_head(const hparams & h, uint32_t layer) {
    return h.is_draft_head(layer) && h.layers[layer].feed_forward.n_expert > 0;
}

// A layer has a state, or attends, or feeds forward.
void read_nemotron_h(const metadata & in, hparams & h) {
    const state_spec state = read_ssm(in, state_kind::mamba2);
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        layer_spec & layer = h.layers[il];
        const bool feeds = layer.feed_forward.n_ff > 0;
        if (feeds && !has_nemotron_draft_head(h, il)) {
            layer.n_head = layer.n_head_kv = 0;
        } else if (layer.n_head_kv == 0) {
            make_recurrent(layer, state);
        }
        layer.rope.n_rot = 0;
    }
}

// Where a layer feeds forward it has experts, which may see a smaller width.
void read_nemotron_h_moe(const metadata & in, hparams & h) {
    read_nemotron_h(in, h);
    read_weights(in, h);
    h.draft_norm = norm_kind::layer;
    h.draft_norm_eps = in.optional_number("attention.layer_norm_epsilon", h.norm_eps, 0.0f, 1.0f);
    const uint32_t n_latent = in.optional("moe_latent_size", 0, 0, MAX_WIDTH);
    for (layer_spec & layer : h.layers) {
        feed_forward_spec & ff = layer.feed_forward;
        if (ff.n_expert > 0) {
            ff.n_ff = 0;
            ff.n_ff_shared = in.required("expert_shared_feed_forward_length", 1, MAX_WIDTH * 4);
            ff.n_latent = n_latent;
        }
    }
}

// No layer attends or feeds forward.
void read_mamba2(const metadata & in, hparams & h) {
    const state_spec state = read_ssm(in, state_kind::mamba2);
    for (layer_spec & layer : h.layers) {
        make_recurrent(layer, state);
        layer.feed_forward.n_ff = 0;
        layer.rope.n_rot = 0;
    }
}

void read_falcon_h1(const metadata & in, hparams & h) {
    const state_spec state = read_ssm(in, state_kind::mamba2);
    for (layer_spec & layer : h.layers) {
        layer.state = state;
    }
}

// Layers may have no KV heads.
arch_recipe hybrid(const char * name, int rope_mode, const tensors & frame, const tensors & layer,
                   void (*read)(const metadata & in, hparams & h)) {
    arch_recipe r = recipe(name, rope_mode, frame, layer, read);
    r.partial_rope = true;
    r.attending = arch_recipe::some;
    return r;
}

arch_recipe nemotron_h() {
    // one norm in each layer, whatever the layer is
    const auto norm_of = [](role r, with layers) {
        return vector_of("attn_norm.weight", r, extent::embd, presence::required, layers);
    };
    const auto nemotron_norms = tensors{norm_of(role::attn_norm, with::attention), norm_of(role::attn_norm, with::state),
                                        norm_of(role::ffn_norm, with::dense), norm_of(role::ffn_norm, with::experts_alone)};
    const auto attends = only(with::attention, projections() + output_bias_of_attention(presence::optional));
    arch_recipe r = hybrid("nemotron_h", GGML_ROPE_TYPE_NEOX, frame(),
                           nemotron_norms + attends + mamba2(presence::required) + ungated(), read_nemotron_h);
    r.activation = activation_kind::relu_sqr;
    r.may_only_feed = true;
    return r;
}

arch_recipe nemotron_with_experts(const arch_recipe & dense) {
    arch_recipe r = with_experts(dense, gating_kind::sigmoid, arch_recipe::beside);
    r.name = "nemotron_h_moe";
    r.read = read_nemotron_h_moe;
    const auto norm_of_head =
        vector_of("post_attention_norm.weight", role::ffn_norm, extent::embd, presence::required, with::draft_head);
    r.layer = dense.layer + choice_bias(presence::required) + latent_experts() + tensors{norm_of_head};
    return with_draft_head(r, presence::required);
}

} // namespace

std::vector<arch_recipe> hybrid_recipes() {
    constexpr auto neox = GGML_ROPE_TYPE_NEOX;
    const auto post_norm = ffn_norm("post_attention_norm.weight");
    const auto beta_alpha = tensors{
        matrix("ssm_beta.weight", role::state_beta, extent::embd, extent::state_heads, presence::required, with::state),
        matrix("ssm_alpha.weight", role::state_alpha, extent::embd, extent::state_heads, presence::required, with::state)};
    // an older form of state_in and state_gate, which newer files may have beside them
    const auto older = unscaled(
        {matrix("ssm_in.weight", role::state_in_gated, extent::embd, extent::state_in_gated, presence::older, with::state)});
    const auto beta_alpha_in_one = tensors{matrix("ssm_ba.weight", role::state_beta_alpha, extent::embd,
                                                  extent::state_heads_twice, presence::required, with::state)};
    const auto attending = only(with::attention, projections());
    const auto attending_normed = only(with::attention, projections() + head_norms());
    const auto output_bias = only(with::attention, output_bias_of_attention(presence::optional));
    const auto short_conv = unscaled(state_in("shortconv.in_proj.weight") + taps("shortconv.conv.weight") +
                                     state_out("shortconv.out_proj.weight", extent::channels));
    const auto qwen35 = attn_norm() + attending_normed + delta_net() + beta_alpha + post_norm;
    const auto qwen3next =
        attn_norm() + attending_normed + unscaled(unless_older(delta_net()) + beta_alpha_in_one) + older + post_norm;
    const auto experts_beside_shared = fused_experts() + shared_expert(presence::required);
    const auto lfm2 = attn_norm() + attending_normed + short_conv + ffn_norm() + unscaled(gated());
    using r = arch_recipe;
    arch_recipe granite_hybrid =
        hybrid("granitehybrid", GGML_ROPE_TYPE_NORMAL, frame(),
               attn_norm() + attending + output_bias + mamba2(presence::required) + ffn_norm() + unscaled(gated()) +
                   gated_biases() + unscaled(experts() + shared_expert(presence::ignored)),
               read_granite_hybrid);
    granite_hybrid.rope_factors = rope_factors::of_model;
    const arch_recipe nemotron = nemotron_h();
    arch_recipe mamba_2 = hybrid("mamba2", neox, frame(), attn_norm() + mamba2(presence::required), read_mamba2);
    mamba_2.attending = r::no_layer;
    const auto unused_factors = tensors{vector_of("rope_freqs.weight", role::count, extent::pairs, presence::ignored)};
    const auto kimi = attn_norm() + kimi_delta_net() + latent_attention() + ffn_norm() + choice_bias(presence::required) +
                      unscaled(gated() + experts() + shared_expert(presence::ignored));
    return {
        with_draft_head(hybrid("qwen35", neox, frame(), qwen35 + gated(), read_qwen35)),
        with_draft_head(with_experts(hybrid("qwen35moe", neox, frame(), qwen35 + experts_beside_shared, read_qwen35moe),
                                     gating_kind::softmax, r::always)),
        with_draft_head(with_experts(hybrid("qwen3next", neox, frame(), qwen3next + experts_beside_shared, read_qwen3next),
                                     gating_kind::softmax, r::always)),
        hybrid("lfm2", neox, frame("token_embd_norm.weight"), lfm2, read_lfm2),
        with_experts(hybrid("lfm2moe", neox, frame("token_embd_norm.weight"),
                            lfm2 + unscaled(experts()) + choice_bias(presence::required), read_lfm2moe),
                     gating_kind::sigmoid, r::always),
        with_experts(granite_hybrid, gating_kind::softmax, r::allowed),
        nemotron,
        nemotron_with_experts(nemotron),
        mamba_2,
        with_experts(hybrid("kimi-linear", neox, frame(), kimi, read_kimi_linear), gating_kind::sigmoid, r::always),
        hybrid("falcon-h1", neox, frame() + unused_factors,
               attention() + output_bias_of_attention(presence::ignored) + mamba2(presence::optional) + ffn_norm("ffn_norm") +
                   unscaled(gated()) + gated_biases(),
               read_falcon_h1),
    };
}

} // namespace kvg
