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

// Gemma 4's attention. Without a matrix for V, V is made of K's; a layer that reads another layer's K and V may still have matrices for them.
tensors attention_of_gemma4() {
    const auto k_of = [](with layers, presence matrix_presence, presence norm_presence) {
        return tensors{
            matrix("attn_k.weight", role::wk, extent::embd, extent::k, matrix_presence, layers),
            matrix("attn_v.weight", role::wv, extent::embd, extent::v,
                   layers == with::own_kv ? presence::optional : presence::ignored, layers),
            vector_of("attn_k_norm.weight", role::k_norm, extent::head_k, norm_presence, layers),
        };
    };
    return tensors{vector_of("attn_norm.weight", role::attn_norm, extent::embd, presence::required),
                   matrix("attn_qkv.weight", role::wqkv, extent::embd, extent::qkv, presence::optional),
                   matrix("attn_q.weight", role::wq, extent::embd, extent::q, presence::unless_fused),
                   matrix("attn_output.weight", role::wo, extent::out, extent::embd, presence::required),
                   vector_of("attn_q_norm.weight", role::q_norm, extent::head_k, presence::required)} +
           k_of(with::own_kv, presence::unless_fused, presence::required) +
           k_of(with::shared_kv, presence::ignored, presence::ignored);
}

// Experts beside a dense feed-forward, with norms of their own.
tensors experts_of_gemma4() {
    tensors all = experts();
    for (tensor_spec & t : all) {
        t.presence = t.role == role::expert_gate || t.role == role::expert_up ? presence::unless_fused : t.presence;
    }
    return all +
           tensors{
               vector_of("ffn_gate_inp.scale", role::router_scale, extent::embd, presence::required, with::experts),
               vector_of("post_ffw_norm_1.weight", role::dense_post_norm, extent::embd, presence::required, with::experts),
               vector_of("pre_ffw_norm_2.weight", role::expert_norm, extent::embd, presence::required, with::experts),
               vector_of("post_ffw_norm_2.weight", role::expert_post_norm, extent::embd, presence::required, with::experts),
               {"ffn_gate_up_exps.weight",
                role::expert_gate_up,
                {extent::embd, extent::expert_gate_up, extent::expert},
                presence::optional,
                with::experts},
           };
}

tensors layer_embeddings() {
    constexpr auto layers = with::layer_embd;
    return with_scales(scale::none, {matrix("per_layer_token_embd.weight", role::layer_embd, extent::embd_layers, extent::vocab,
                                            presence::required, layers),
                                     matrix("per_layer_model_proj.weight", role::layer_embd_proj, extent::embd,
                                            extent::embd_layers, presence::required, layers),
                                     vector_of("per_layer_proj_norm.weight", role::layer_embd_norm, extent::embd_layer,
                                               presence::required, layers)});
}

tensors uses_of_layer_embeddings() {
    constexpr auto layers = with::layer_embd;
    return with_scales(
        scale::none, {matrix("inp_gate.weight", role::embd_gate, extent::embd, extent::embd_layer, presence::required, layers),
                      matrix("proj.weight", role::embd_proj, extent::embd_layer, extent::embd, presence::required, layers),
                      vector_of("post_norm.weight", role::embd_post_norm, extent::embd, presence::required, layers)});
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

// Gemma 4's layers with a window have heads of other widths, and no factors for rope's frequencies.
void read_heads_of_windows(const metadata & in, hparams & h) {
    const uint32_t dim_k = in.required("attention.key_length_swa", 1, 4096);
    const uint32_t dim_v = in.required("attention.value_length_swa", 1, 4096);
    const auto n_rot = static_cast<uint32_t>(h.layers[0].rope.n_rot);
    const uint32_t n_rot_window = in.optional("rope.dimension_count_swa", n_rot, 1, dim_k);
    if (n_rot_window % 2 != 0) {
        fail(KVG_UNSUPPORTED, "%s: %u rotated dimensions of a head; rope rotates pairs", in.file().path().c_str(),
             n_rot_window);
    }
    for (layer_spec & layer : h.layers) {
        if (layer.window > 0) {
            layer.head_dim_k = dim_k;
            layer.head_dim_v = dim_v;
            layer.rope.n_rot = static_cast<int>(n_rot_window);
            layer.rope.with_factors = false;
        }
        if (layer.head_dim_k != layer.head_dim_v) {
            fail(KVG_UNSUPPORTED, "%s: heads of %u in K and of %u in V; architecture '%s' has both alike",
                 in.file().path().c_str(), layer.head_dim_k, layer.head_dim_v, h.arch.c_str());
        }
    }
}

// The last layers read K and V of the last layer before them that has their kind of attention: the file's order is window, then full.
void share_kv(const metadata & in, hparams & h) {
    const uint32_t n = h.n_layer();
    const uint32_t n_shared = in.optional("attention.shared_kv_layers", 0, 0, n < 2 ? 0 : n - 2);
    for (uint32_t il = n - n_shared; il < n; ++il) {
        layer_spec & layer = h.layers[il];
        layer.kv_from = n - n_shared - (layer.window > 0 ? 2 : 1);
        const layer_spec & owner = h.layers[layer.kv_from];
        if (owner.window != layer.window || owner.n_head_kv != layer.n_head_kv) {
            fail(KVG_UNSUPPORTED, "%s: layer %u reads K and V of layer %u, which has another window or other KV heads",
                 in.file().path().c_str(), il, layer.kv_from);
        }
    }
}

void read_gemma4(const metadata & in, hparams & h) {
    const char * path = in.file().path().c_str();
    if (!in.file().is_array(h.arch + ".attention.sliding_window_pattern")) {
        fail(KVG_MODEL_LOAD, "%s: '%s.attention.sliding_window_pattern' is missing, or says nothing of each layer", path,
             h.arch.c_str());
    }
    if (h.layers[0].rope.yarn > 0.0f || h.rope_factors != rope_factors::of_model) {
        fail(KVG_UNSUPPORTED, "%s: rope scaling '%s' of architecture '%s' is not supported", path,
             in.text("rope.scaling.type")->c_str(), h.arch.c_str());
    }
    read_windows(in, h, in.required("attention.sliding_window", 1, metadata::MAX_POSITION), 0, 10000.0f, 1.0f);
    read_heads_of_windows(in, h);
    for (layer_spec & layer : h.layers) {
        layer.scale = 1.0f;
        layer.norm_v = true;
        if (layer.window == 0 && !in.file().find_tensor("rope_freqs.weight")) {
            fail(KVG_MODEL_LOAD, "%s: tensor 'rope_freqs.weight' is missing", path);
        }
    }
    share_kv(in, h);
    h.n_embd_layer = in.required("embedding_length_per_layer_input", 0, metadata::MAX_WIDTH);
    h.final_soft_cap = in.optional_number("final_logit_softcapping", 30.0f, 0.0f, 1e6f);
}

std::vector<arch_recipe> make_recipes() {
    const auto output_bias = tensors{vector_of("output.bias", role::output_bias, extent::vocab, presence::optional)};
    // of models that rank texts; what they generate doesn't use it
    const auto classifier = tensors{vector_of("cls.output.weight", role::count, extent::embd, presence::ignored)};
    const auto sinks = tensors{vector_of("attn_sinks.weight", role::sinks, extent::heads, presence::required)};
    const auto layer_scale = tensors{vector_of("layer_output_scale.weight", role::layer_scale, one, presence::optional)};
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
        {"gemma4", GGML_ROPE_TYPE_NEOX, rms, attend, activation_kind::geglu, softmax, r::beside, rope_factors::of_model, false,
         true, frame() + layer_embeddings(),
         attention_of_gemma4() + post_norms() + ffn_norm() + gated() + experts_of_gemma4() + uses_of_layer_embeddings() +
             layer_scale,
         read_gemma4},
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
    case extent::expert_gate_up:
        return 2 * int64_t{layer->feed_forward.n_ff_expert};
    case extent::embd_layer:
        return h.n_embd_layer;
    case extent::embd_layers:
        return int64_t{h.n_embd_layer} * h.n_layer();
    }
    return 0;
}

} // namespace kvg
