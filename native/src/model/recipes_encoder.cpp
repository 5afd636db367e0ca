// Recipes of encoders: every token sees the whole text, and what comes of it is hidden states.
#include "error.h"
#include "model/recipes.h"

namespace kvg {

namespace {

void see_both_ways(hparams & h) {
    h.encodes = true;
    for (layer_spec & layer : h.layers) {
        layer.both_ways = true;
    }
}

// libllama lets tokens see what is before them only, unless the file says otherwise.
void require_both_ways(const metadata & in, const hparams & h) {
    if (in.flag("attention.causal").value_or(true)) {
        fail(KVG_UNSUPPORTED, "%s: '%s.attention.causal' is not false; architecture '%s' is supported as an encoder only",
             in.file().path().c_str(), h.arch.c_str(), h.arch.c_str());
    }
}

// A token's kind, of which there is one in a text that stands alone.
void read_token_types(const metadata & in, hparams & h) {
    const auto n = in.file().get_uint("tokenizer.ggml.token_type_count").value_or(0);
    if (n < 1 || n > metadata::MAX_WIDTH) {
        fail(KVG_MODEL_LOAD, "%s: key 'tokenizer.ggml.token_type_count' is missing or out of range", in.file().path().c_str());
    }
    h.n_token_types = static_cast<uint32_t>(n);
}

void read_nomic_bert(const metadata & in, hparams & h) {
    require_both_ways(in, h);
    see_both_ways(h);
    read_token_types(in, h);
}

// Embeddings of positions, and no rope.
void read_bert(const metadata & in, hparams & h) {
    read_nomic_bert(in, h);
    h.learned_positions = true;
    for (layer_spec & layer : h.layers) {
        layer.rope.n_rot = 0;
    }
}

// The second of so many layers has experts.
void read_nomic_bert_moe(const metadata & in, hparams & h) {
    read_nomic_bert(in, h);
    const uint32_t period = in.optional("moe_every_n_layers", 0, 0, h.n_layer());
    const float scale = in.optional_number("expert_weights_scale", 0.0f, 0.0f, 1e6f);
    for (layer_spec & layer : h.layers) {
        layer.feed_forward.sums_to_1 = false;
        layer.feed_forward.expert_scale = scale;
    }
    make_dense(in, h, [&](uint32_t il) { return period == 0 || il % period != 1; });
}

// What its pooled states go through may lie in the file, too: two matrices, by way of another width. They do to each state what they do
// to a mean of states.
void read_gemma_embedding(const metadata & in, hparams & h) {
    see_both_ways(h);
    read_windows(in, h, in.required("attention.sliding_window", 2, metadata::MAX_POSITION), 6, 10000.0f, 1.0f);
    h.n_dense = in.optional("dense_2_feat_out", 0, 0, metadata::MAX_WIDTH);
    const bool first = in.file().find_tensor("dense_2.weight");
    const bool second = in.file().find_tensor("dense_3.weight");
    if (first != second || in.optional("dense_3_feat_in", h.n_dense, 0, metadata::MAX_WIDTH) != h.n_dense) {
        fail(KVG_UNSUPPORTED, "%s: 'dense_2.weight' and 'dense_3.weight' belong together: one is missing, or has another width",
             in.file().path().c_str());
    }
}

tensors normed_sum(const char * weight, const char * bias, role r, role bias_role) {
    return {vector_of(weight, r, extent::embd, presence::required),
            vector_of(bias, bias_role, extent::embd, presence::required)};
}

// Norms come behind what attention and the feed-forward were added to.
tensors layer_of_bert(const tensors & feed_forward) {
    return projections() + output_bias_of_attention(presence::optional) +
           normed_sum("attn_output_norm.weight", "attn_output_norm.bias", role::attn_sum_norm, role::attn_sum_norm_bias) +
           unscaled(feed_forward) +
           normed_sum("layer_output_norm.weight", "layer_output_norm.bias", role::ffn_sum_norm, role::ffn_sum_norm_bias);
}

tensors frame_of_bert() {
    return {{"token_embd.weight", role::token_embd, {extent::embd, extent::vocab, one}, presence::required},
            {"token_types.weight", role::type_embd, {extent::embd, extent::token_types, one}, presence::optional},
            vector_of("token_embd_norm.weight", role::embd_norm, extent::embd, presence::required),
            vector_of("token_embd_norm.bias", role::embd_norm_bias, extent::embd, presence::required)};
}

arch_recipe bert_like(const char * name, const tensors & frame, const tensors & feed_forward, activation_kind activation,
                      void (*read)(const metadata & in, hparams & h)) {
    arch_recipe r = recipe(name, GGML_ROPE_TYPE_NEOX, frame, layer_of_bert(feed_forward), read);
    r.norm = norm_kind::layer;
    r.activation = activation;
    r.partial_rope = true;
    return r;
}

} // namespace

std::vector<arch_recipe> encoder_recipes() {
    constexpr auto gelu = activation_kind::gelu;
    const auto positions =
        tensors{{"position_embd.weight", role::position_embd, {extent::embd, extent::positions, one}, presence::required}};
    const auto dense = tensors{{"dense_2.weight", role::dense_in, {extent::embd, extent::dense, one}, presence::optional},
                               {"dense_3.weight", role::dense_out, {extent::dense, extent::embd, one}, presence::optional}};
    // libllama reads such biases, and adds none
    const auto unused_biases = tensors{vector_of("ffn_up.bias", role::count, extent::ff, presence::ignored),
                                       vector_of("ffn_down.bias", role::count, extent::embd, presence::ignored)};
    tensors mixed = ungated();
    for (const tensor_spec & t : experts()) {
        mixed = t.role == role::expert_gate ? mixed : mixed + tensors{t};
    }
    tensors frame_of_gemma = frame();
    for (tensor_spec & t : frame_of_gemma) {
        t.presence = t.role == role::output ? presence::ignored : t.presence;
    }
    arch_recipe gemma =
        recipe("gemma-embedding", GGML_ROPE_TYPE_NEOX, frame_of_gemma + dense,
               attention() + head_norms() + post_norms() + ffn_norm() + unscaled(gated()), read_gemma_embedding);
    gemma.activation = activation_kind::geglu;
    gemma.partial_rope = true;
    gemma.scaled_embedding = true;
    return {
        bert_like("bert", frame_of_bert() + positions, ungated(), gelu, read_bert),
        bert_like("nomic-bert", frame_of_bert(), gated() + unused_biases, activation_kind::swiglu, read_nomic_bert),
        with_experts(bert_like("nomic-bert-moe", frame_of_bert(), mixed, gelu, read_nomic_bert_moe), gating_kind::softmax,
                     arch_recipe::allowed),
        gemma,
    };
}

} // namespace kvg
