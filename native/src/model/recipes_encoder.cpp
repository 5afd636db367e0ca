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
    read_classifier(in, h);
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

// Positions are told by ALiBi, and gate and up may be one matrix. What other rerankers have as `cls.output` is `cls` here.
void read_jina_bert_v2(const metadata & in, hparams & h) {
    constexpr float ALIBI = 8.0f;
    read_nomic_bert(in, h);
    read_classifier(in, h);
    const gguf_file & file = in.file();
    h.classifier.n_classes = file.find_tensor("cls.weight") ? 1 : 0;
    h.classifier.end = classifier_end::tanh;
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        layer_spec & layer = h.layers[il];
        feed_forward_spec & feeds = layer.feed_forward;
        const gguf_tensor * up = file.find_tensor(strformat("blk.%u.ffn_up.weight", il));
        const bool has_gate = file.find_tensor(strformat("blk.%u.ffn_gate.weight", il)) != nullptr;
        feeds.in_one = !has_gate && up && up->ne[1] == 2 * int64_t{feeds.n_ff};
        feeds.activation = has_gate || feeds.in_one ? activation_kind::geglu : activation_kind::gelu;
        layer.max_bias = ALIBI;
        layer.rope.n_rot = 0;
    }
}

// Every third layer sees all, the first one first; the others have a window.
void read_modern_bert(const metadata & in, hparams & h) {
    require_both_ways(in, h);
    see_both_ways(h);
    read_classifier(in, h, true);
    h.classifier.gelu = true;
    const std::string kind = in.text("hidden_activation").value_or("gelu");
    if (kind == "relu" || kind == "reglu") {
        fail(KVG_UNSUPPORTED, "%s: '%s.hidden_activation' is '%s', and is supported as gelu or silu", in.file().path().c_str(),
             h.arch.c_str(), kind.c_str());
    }
    const bool by_silu = kind == "silu" || kind == "swish" || kind == "swiglu";
    const uint32_t window = in.optional("attention.sliding_window", 0, 0, metadata::MAX_POSITION);
    const std::vector<bool> windowed = all_but_first_of(in, "attention.sliding_window_pattern", 3, h.n_layer());
    const float base = in.optional_number("rope.freq_base_swa", 10000.0f, 1e-3f, 1e12f);
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        layer_spec & layer = h.layers[il];
        layer.feed_forward.activation = by_silu ? activation_kind::swiglu : activation_kind::geglu;
        if (il > 0 && !in.file().find_tensor(strformat("blk.%u.attn_norm.weight", il))) {
            fail(KVG_MODEL_LOAD, "%s: tensor 'blk.%u.attn_norm.weight' is missing", in.file().path().c_str(), il);
        }
        if (window > 0 && windowed[il]) {
            layer.window = window;
            layer.rope.freq_base = base;
            layer.rope.freq_scale = 1.0f;
        }
    }
}

void read_eurobert(const metadata & in, hparams & h) {
    require_both_ways(in, h);
    see_both_ways(h);
}

void read_neo_bert(const metadata & in, hparams & h) {
    read_eurobert(in, h);
    read_classifier(in, h);
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

tensors frame_of_normed(const char * norm_name) {
    return {{"token_embd.weight", role::token_embd, {extent::embd, extent::vocab, one}, presence::required},
            vector_of(norm_name, role::output_norm, extent::embd, presence::required)};
}

// Q, K and V in one matrix, gate and up in another.
tensors layer_of_fused(presence first_norm) {
    const auto attends = tensors{vector_of("attn_norm.weight", role::attn_norm, extent::embd, first_norm),
                                 matrix("attn_qkv.weight", role::wqkv, extent::embd, extent::qkv, presence::required),
                                 matrix("attn_output.weight", role::wo, extent::out, extent::embd, presence::required)};
    return attends + ffn_norm() + unscaled(gated_in_one());
}

arch_recipe jina_bert_v2() {
    const auto apart = with::dense_apart;
    const auto in_one = with::dense_in_one;
    const auto feed_forward =
        tensors{matrix("ffn_gate.weight", role::ffn_gate, extent::embd, extent::ff, presence::optional, apart),
                matrix("ffn_up.weight", role::ffn_up, extent::embd, extent::ff, presence::required, apart),
                vector_of("ffn_up.bias", role::ffn_up_bias, extent::ff, presence::optional, apart),
                matrix("ffn_up.weight", role::ffn_gate_up, extent::embd, extent::gate_up, presence::required, in_one),
                vector_of("ffn_up.bias", role::ffn_gate_up_bias, extent::gate_up, presence::optional, in_one),
                matrix("ffn_down.weight", role::ffn_down, extent::ff, extent::embd, presence::required),
                vector_of("ffn_down.bias", role::ffn_down_bias, extent::embd, presence::optional)};
    const auto more_norms =
        tensors{vector_of("attn_q_norm.weight", role::q_norm, extent::q, presence::optional),
                vector_of("attn_q_norm.bias", role::q_norm_bias, extent::q, presence::optional),
                vector_of("attn_k_norm.weight", role::k_norm, extent::k, presence::optional),
                vector_of("attn_k_norm.bias", role::k_norm_bias, extent::k, presence::optional),
                vector_of("attn_norm_2.weight", role::attn_sum_norm_2, extent::embd, presence::optional),
                vector_of("attn_norm_2.bias", role::attn_sum_norm_2_bias, extent::embd, presence::optional)};
    const auto classifier = tensors{{"cls.weight", role::class_out, {extent::embd, extent::classes, one}, presence::optional},
                                    vector_of("cls.bias", role::class_out_bias, extent::classes, presence::optional)};
    arch_recipe r =
        bert_like("jina-bert-v2", frame_of_bert() + classifier, feed_forward, activation_kind::geglu, read_jina_bert_v2);
    r.layer = r.layer + more_norms;
    return r;
}

arch_recipe modern_bert() {
    const auto classifier =
        classifier_of_two() + tensors{vector_of("cls.norm.weight", role::class_norm, extent::embd, presence::optional)};
    const auto first_norm = tensors{vector_of("token_embd_norm.weight", role::embd_norm, extent::embd, presence::required)};
    arch_recipe r = recipe("modern-bert", GGML_ROPE_TYPE_NEOX, frame_of_normed("output_norm.weight") + first_norm + classifier,
                           layer_of_fused(presence::optional), read_modern_bert);
    r.norm = norm_kind::layer;
    r.activation = activation_kind::geglu;
    r.partial_rope = true;
    return r;
}

arch_recipe eurobert() {
    arch_recipe r = recipe("eurobert", GGML_ROPE_TYPE_NEOX, frame_of_normed("output_norm.weight"),
                           attention() + ffn_norm() + unscaled(gated()), read_eurobert);
    r.partial_rope = true;
    return r;
}

arch_recipe neo_bert() {
    arch_recipe r = recipe("neo-bert", GGML_ROPE_TYPE_NORMAL, frame_of_normed("enc.output_norm.weight") + classifier_of_two(),
                           layer_of_fused(presence::required), read_neo_bert);
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
    const auto mixed = ungated() + experts_without_gates();
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
        bert_like("bert", frame_of_bert() + positions + classifier_of_two(), ungated(), gelu, read_bert),
        bert_like("nomic-bert", frame_of_bert(), gated() + unused_biases, activation_kind::swiglu, read_nomic_bert),
        with_experts(bert_like("nomic-bert-moe", frame_of_bert(), mixed, gelu, read_nomic_bert_moe), gating_kind::softmax,
                     arch_recipe::allowed),
        gemma,
        jina_bert_v2(),
        bert_like("jina-bert-v3", frame_of_bert(), ungated(), gelu, read_nomic_bert),
        modern_bert(),
        eurobert(),
        neo_bert(),
    };
}

} // namespace kvg
