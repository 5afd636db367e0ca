// Recipes of Gemma, Gemma 2, 3, 3n and 4.
#include <cmath>

#include "error.h"
#include "model/recipes.h"

namespace kvg {

namespace {

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
    return fused_experts() +
           tensors{
               vector_of("ffn_gate_inp.scale", role::router_scale, extent::embd, presence::required, with::experts),
               vector_of("post_ffw_norm_1.weight", role::dense_post_norm, extent::embd, presence::required, with::experts),
               vector_of("pre_ffw_norm_2.weight", role::expert_norm, extent::embd, presence::required, with::experts),
               vector_of("post_ffw_norm_2.weight", role::expert_post_norm, extent::embd, presence::required, with::experts),
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

void read_gemma3(const metadata & in, hparams & h) {
    const uint32_t window = in.optional("attention.sliding_window", 0, 0, metadata::MAX_POSITION);
    if (window > 0) {
        read_windows(in, h, window, 6, 10000.0f, 1.0f);
    }
    h.final_soft_cap = in.optional_number("final_logit_softcapping", 0.0f, 0.0f, 1e6f);
    scale_by_embedding(h, 62); // 27B
}

// Gemma 4's assistant: queries alone, of which libllama multiplies none by a scale.
tensors assistant_of_gemma4() {
    return unscaled(attn_norm() +
                    tensors{matrix("attn_q.weight", role::wq, extent::embd, extent::q, presence::required),
                            matrix("attn_output.weight", role::wo, extent::out, extent::embd, presence::required),
                            vector_of("attn_q_norm.weight", role::q_norm, extent::head_k, presence::required)} +
                    post_norms() + ffn_norm() + gated());
}

tensors frame_of_assistant() {
    return with_scales(
        scale::none,
        {matrix("token_embd.weight", role::token_embd, extent::embd, extent::vocab, presence::required),
         vector_of("output_norm.weight", role::output_norm, extent::embd, presence::required),
         matrix("nextn.pre_projection.weight", role::draft_in, extent::target_embd_twice, extent::embd, presence::required),
         matrix("nextn.post_projection.weight", role::draft_out, extent::embd, extent::target_embd, presence::required)});
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
void share_kv(const metadata & in, hparams & h, uint32_t n_shared) {
    const uint32_t n = h.n_layer();
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

// What Gemma 4 and its assistant have in common.
void read_attention_of_gemma4(const metadata & in, hparams & h) {
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
}

void read_gemma4(const metadata & in, hparams & h) {
    read_attention_of_gemma4(in, h);
    share_kv(in, h, in.optional("attention.shared_kv_layers", 0, 0, h.n_layer() < 2 ? 0 : h.n_layer() - 2));
    h.n_embd_layer = in.required("embedding_length_per_layer_input", 0, metadata::MAX_WIDTH);
    h.final_soft_cap = in.optional_number("final_logit_softcapping", 30.0f, 0.0f, 1e6f);
}

void read_gemma4_assistant(const metadata & in, hparams & h) {
    read_attention_of_gemma4(in, h);
    h.n_embd_target = in.required("embedding_length_out", 1, metadata::MAX_WIDTH);
    const uint32_t n = in.required("nextn_predict_layers", 0, metadata::MAX_POSITION);
    if (n != h.n_layer()) {
        fail(KVG_UNSUPPORTED, "%s: '%s.nextn_predict_layers' is %u, and all of its %u layers draft", in.file().path().c_str(),
             h.arch.c_str(), n, h.n_layer());
    }
}

// A layer that reads another's K and V has matrices for its own all the same, and libllama multiplies its queries by no scale.
tensors attention_of_gemma3n() {
    const auto q_of = [](with layers, scale how) {
        return with_scales(how, {matrix("attn_qkv.weight", role::wqkv, extent::embd, extent::qkv, presence::optional, layers),
                                 matrix("attn_q.weight", role::wq, extent::embd, extent::q, presence::unless_fused, layers)});
    };
    const auto kv_of = [](with layers, presence matrices, presence norm) {
        return tensors{matrix("attn_k.weight", role::wk, extent::embd, extent::k, matrices, layers),
                       matrix("attn_v.weight", role::wv, extent::embd, extent::v, matrices, layers),
                       vector_of("attn_k_norm.weight", role::k_norm, extent::head_k, norm, layers)};
    };
    return attn_norm() + q_of(with::own_kv, scale::applied) + q_of(with::shared_kv, scale::ignored) +
           kv_of(with::own_kv, presence::unless_fused, presence::required) +
           kv_of(with::shared_kv, presence::ignored, presence::ignored) +
           tensors{vector_of("attn_q_norm.weight", role::q_norm, extent::head_k, presence::required),
                   matrix("attn_output.weight", role::wo, extent::out, extent::embd, presence::required)};
}

tensors altup_of_frame() {
    return {
        {"altup_proj.weight", role::altup_in, {extent::embd, extent::embd, extent::altup_others}, presence::required},
        {"altup_unembd_proj.weight", role::altup_out, {extent::embd, extent::embd, extent::altup_others}, presence::required}};
}

tensors altup_and_laurel() {
    const auto plain = [](const char * name, role r, extent in, extent out) {
        return tensor_spec{name, r, {in, out, one}, presence::required};
    };
    return {plain("altup_router.weight", role::altup_router, extent::embd, extent::altup),
            vector_of("altup_router_norm.weight", role::altup_router_norm, extent::embd, presence::required),
            plain("altup_predict_coef.weight", role::altup_guess, extent::altup, extent::altup_squared),
            plain("altup_correct_coef.weight", role::altup_correction, extent::altup, extent::altup),
            vector_of("altup_correct_scale.weight", role::altup_correction_scale, extent::embd, presence::required),
            plain("laurel_l.weight", role::laurel_down, extent::embd, extent::laurel),
            plain("laurel_r.weight", role::laurel_up, extent::laurel, extent::embd),
            vector_of("laurel_post_norm.weight", role::laurel_norm, extent::embd, presence::required)};
}

// There are two Gemmas 3n, and what is alike in both libllama reads from no file.
void read_gemma3n(const metadata & in, hparams & h) {
    constexpr uint32_t N_WITH_KV = 20;
    constexpr uint32_t N_SPARSE = 10;
    constexpr float CUTOFF = 1.6448533535003662f; // 5 % of a normal distribution are above it
    h.n_embd_layer = 256;
    h.n_altup = 4;
    h.laurel_rank = 64;
    h.final_soft_cap = 30.0f;
    read_windows(in, h, in.required("attention.sliding_window", 1, metadata::MAX_POSITION), 5, 10000.0f, 1.0f);
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        h.layers[il].scale = 1.0f;
        h.layers[il].norm_v = true;
        h.layers[il].feed_forward.gate_cutoff = il < N_SPARSE ? CUTOFF : 0.0f;
    }
    share_kv(in, h, h.n_layer() > N_WITH_KV ? h.n_layer() - N_WITH_KV : 0);
}

} // namespace

std::vector<arch_recipe> gemma_recipes() {
    const auto layer_scale = tensors{vector_of("layer_output_scale.weight", role::layer_scale, one, presence::optional)};
    const auto gemma = [](const char * name, const tensors & frame, const tensors & layer,
                          void (*read)(const metadata & in, hparams & h)) {
        arch_recipe r = recipe(name, GGML_ROPE_TYPE_NEOX, frame, layer, read);
        r.activation = activation_kind::geglu;
        r.partial_rope = true;
        r.scaled_embedding = true;
        return r;
    };
    arch_recipe gemma4 = with_experts(gemma("gemma4", frame() + layer_embeddings(),
                                            attention_of_gemma4() + post_norms() + ffn_norm() + gated() + experts_of_gemma4() +
                                                uses_of_layer_embeddings() + layer_scale,
                                            read_gemma4),
                                      gating_kind::softmax, arch_recipe::beside);
    gemma4.rope_factors = rope_factors::of_model;
    gemma4.partial_rope = false;
    arch_recipe assistant = gemma(
        "gemma4-assistant", frame_of_assistant(),
        assistant_of_gemma4() + tensors{vector_of("layer_output_scale.weight", role::layer_scale, one, presence::required)},
        read_gemma4_assistant);
    assistant.rope_factors = rope_factors::of_model;
    assistant.partial_rope = false;
    assistant.assists = true;
    return {
        gemma("gemma", frame(), attention() + ffn_norm() + unscaled(gated()), nullptr),
        gemma("gemma2", frame(), attention() + post_norms() + ffn_norm() + unscaled(gated()), read_gemma2),
        gemma("gemma3", frame(), attention() + head_norms() + post_norms() + ffn_norm() + unscaled(gated()), read_gemma3),
        gemma("gemma3n", frame() + layer_embeddings() + altup_of_frame(),
              attention_of_gemma3n() + post_norms() + ffn_norm() + unscaled(gated()) + uses_of_layer_embeddings() +
                  altup_and_laurel(),
              read_gemma3n),
        gemma4,
        assistant,
    };
}

} // namespace kvg
