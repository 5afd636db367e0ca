// What recipes are made of: lists of tensors.
#include "model/recipes.h"

#include "error.h"

namespace kvg {

tensors operator+(tensors a, const tensors & b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

tensor_spec vector_of(const char * name, role r, extent n, presence p, with layers) {
    return {name, r, {n, one, one}, p, layers};
}

tensor_spec matrix(const char * name, role r, extent in, extent out, presence p, with layers) {
    return {name, r, {in, out, one}, p, layers, scale::applied};
}

tensor_spec cube(const char * name, role r, extent in, extent out) {
    return {name, r, {in, out, extent::expert}, presence::required, with::experts, scale::applied};
}

tensors unscaled(tensors all) { return with_scales(scale::ignored, std::move(all)); }

tensors with_scales(scale how, tensors all) {
    for (tensor_spec & t : all) {
        t.scale = t.scale == scale::none ? scale::none : how;
    }
    return all;
}

tensors with_presence(presence p, tensors all) {
    for (tensor_spec & t : all) {
        t.presence = p;
    }
    return all;
}

tensors only(with layers, tensors all) {
    for (tensor_spec & t : all) {
        t.layers = t.layers == with::any ? layers : t.layers;
    }
    return all;
}

// Embedding and output, tied where there is no matrix for the output.
tensors frame(const char * norm_name) {
    const tensors all = {
        matrix("token_embd.weight", role::token_embd, extent::embd, extent::vocab, presence::required),
        vector_of(norm_name, role::output_norm, extent::embd, presence::required),
        matrix("output.weight", role::output, extent::embd, extent::vocab, presence::optional),
    };
    return with_scales(scale::none, all);
}

tensors frame_untied() { return with_presence(presence::required, frame()); }

tensors attn_norm() { return {vector_of("attn_norm.weight", role::attn_norm, extent::embd, presence::required)}; }

tensors projections() {
    return {
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

tensors attention() { return attn_norm() + projections(); }

tensors output_bias_of_attention(presence p) { return {vector_of("attn_output.bias", role::wo_bias, extent::embd, p)}; }

tensors head_norms() {
    return {
        vector_of("attn_q_norm.weight", role::q_norm, extent::head_k, presence::required),
        vector_of("attn_k_norm.weight", role::k_norm, extent::head_k, presence::required),
    };
}

// One norm of all a token's queries, another of its K.
tensors wide_norms() {
    return {
        vector_of("attn_q_norm.weight", role::q_norm, extent::q, presence::required),
        vector_of("attn_k_norm.weight", role::k_norm, extent::k, presence::required),
    };
}

tensors post_norms() {
    return {
        vector_of("post_attention_norm.weight", role::attn_post_norm, extent::embd, presence::required),
        vector_of("post_ffw_norm.weight", role::ffn_post_norm, extent::embd, presence::required),
    };
}

tensors ffn_norm(const char * name) { return {vector_of(name, role::ffn_norm, extent::embd, presence::required)}; }

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

tensors ungated_without_biases() {
    return {
        matrix("ffn_up.weight", role::ffn_up, extent::embd, extent::ff, presence::required, with::dense),
        matrix("ffn_down.weight", role::ffn_down, extent::ff, extent::embd, presence::required, with::dense),
    };
}

tensors ungated() {
    return ungated_without_biases() +
           tensors{
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

tensors experts_without_gates() {
    tensors all;
    for (const tensor_spec & t : experts()) {
        all = t.role == role::expert_gate ? all : all + tensors{t};
    }
    return all;
}

tensors fused_experts() {
    tensors all = experts();
    for (tensor_spec & t : all) {
        t.presence = t.role == role::expert_gate || t.role == role::expert_up ? presence::unless_fused : t.presence;
    }
    return all + tensors{{"ffn_gate_up_exps.weight",
                          role::expert_gate_up,
                          {extent::embd, extent::expert_gate_up, extent::expert},
                          presence::optional,
                          with::experts}};
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

tensors choice_bias(presence p) {
    return {vector_of("exp_probs_b.bias", role::expert_choice_bias, extent::expert, p, with::experts)};
}

tensors classifier_of_one() {
    return {{"cls.output.weight", role::class_out, {extent::embd, extent::classes, one}, presence::optional}};
}

tensors classifier_of_two() {
    return classifier_of_one() +
           tensors{vector_of("cls.output.bias", role::class_out_bias, extent::classes, presence::optional),
                   {"cls.weight", role::class_hidden, {extent::embd, extent::embd, one}, presence::optional},
                   vector_of("cls.bias", role::class_hidden_bias, extent::embd, presence::optional)};
}

tensors shared_expert(presence router) {
    constexpr auto layers = with::shared_expert;
    return {vector_of("ffn_gate_inp_shexp.weight", role::shared_router, extent::embd, router, layers),
            matrix("ffn_gate_shexp.weight", role::shared_gate, extent::embd, extent::shared_ff, presence::required, layers),
            matrix("ffn_up_shexp.weight", role::shared_up, extent::embd, extent::shared_ff, presence::required, layers),
            matrix("ffn_down_shexp.weight", role::shared_down, extent::shared_ff, extent::embd, presence::required, layers)};
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

// Files may say that windows have a rope with another base; the models have one.
void read_windows_of_one_base(const metadata & in, hparams & h, uint32_t window, float scale) {
    const float base = h.layers[0].rope.freq_base;
    read_windows(in, h, window, 4, base, scale);
    for (layer_spec & layer : h.layers) {
        layer.rope.freq_base = base;
    }
}

void rotate_in_windows(hparams & h) {
    for (layer_spec & layer : h.layers) {
        layer.rope.n_rot = layer.window > 0 ? layer.rope.n_rot : 0;
    }
}

void tell_distances(hparams & h, float max_bias) {
    for (layer_spec & layer : h.layers) {
        layer.max_bias = max_bias;
        layer.rope.n_rot = 0;
    }
}

// Files that also see pictures have sections of positions, and halves for pairs; positions of texts are the same in the first three.
void read_sections_of_halves(const metadata & in, hparams & h) {
    const auto sections = in.file().get_uints(h.arch + ".rope.dimension_sections", 4);
    if (!sections || (*sections)[0] == 0 || (*sections)[1] == 0) {
        return;
    }
    require_sections_of_halves(in, h);
    for (layer_spec & layer : h.layers) {
        layer.rope.mode = GGML_ROPE_TYPE_NEOX;
    }
}

static std::vector<uint64_t> required_sections(const metadata & in, const hparams & h) {
    const auto sections = in.file().get_uints(h.arch + ".rope.dimension_sections", 4);
    if (!sections) {
        fail(KVG_MODEL_LOAD, "%s: '%s.rope.dimension_sections' is missing", in.file().path().c_str(), h.arch.c_str());
    }
    return *sections;
}

void require_sections_of_halves(const metadata & in, const hparams & h) {
    const std::vector<uint64_t> sections = required_sections(in, h);
    const uint64_t n_covered = sections[0] + sections[1] + sections[2];
    if (n_covered < static_cast<uint64_t>(h.layers[0].rope.n_rot / 2)) {
        fail(KVG_UNSUPPORTED, "%s: the first three sections leave out a pair of rope's %d", in.file().path().c_str(),
             h.layers[0].rope.n_rot / 2);
    }
}

void require_sections_in_turn(const metadata & in, const hparams & h) {
    const std::vector<uint64_t> sections = required_sections(in, h);
    const auto n_pairs = static_cast<uint64_t>(h.layers[0].rope.n_rot / 2);
    for (uint64_t pair = 0; pair < n_pairs; ++pair) {
        if (pair >= 3 * sections[pair % 3]) {
            fail(KVG_UNSUPPORTED, "%s: sections of %llu, %llu and %llu leave out a pair of rope's %llu",
                 in.file().path().c_str(), (unsigned long long) sections[0], (unsigned long long) sections[1],
                 (unsigned long long) sections[2], (unsigned long long) n_pairs);
        }
    }
}

// A class for each label, and one where a file names none.
void read_classifier(const metadata & in, hparams & h, bool by_mean) {
    const uint64_t n_labels = in.file().get_array_length(h.arch + ".classifier.output_labels").value_or(1);
    if (n_labels > metadata::MAX_WIDTH) {
        fail(KVG_MODEL_LOAD, "%s: key '%s.classifier.output_labels' has %llu labels", in.file().path().c_str(), h.arch.c_str(),
             (unsigned long long) n_labels);
    }
    const auto n = static_cast<uint32_t>(n_labels > 0 ? n_labels : 1);
    h.classifier.n_classes = in.file().find_tensor("cls.output.weight") ? n : 0;
    h.classifier.of_mean = in.optional("classifier.pooling_type", by_mean ? 1 : 0, 0, metadata::MAX_POSITION) == 1;
}

void require_array(const metadata & in, const hparams & h, const char * key) {
    if (!in.is_array(key)) {
        fail(KVG_MODEL_LOAD, "%s: '%s.%s' is missing, or is no array", in.file().path().c_str(), h.arch.c_str(), key);
    }
}

void require_experts(const metadata & in, hparams & h) {
    if (h.layers[0].feed_forward.n_expert == 0) {
        fail(KVG_MODEL_LOAD, "%s: no experts, and architecture '%s' is made of them", in.file().path().c_str(), h.arch.c_str());
    }
}

void make_dense(const metadata & in, hparams & h, const std::function<bool(uint32_t)> & is_dense) {
    const std::vector<uint32_t> none(h.n_layer(), 0);
    const std::vector<uint32_t> n_ff = in.optional_per_layer("feed_forward_length", none, 0, metadata::MAX_WIDTH * 4);
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        if (!is_dense(il)) {
            continue;
        }
        if (n_ff[il] == 0) {
            fail(KVG_MODEL_LOAD, "%s: layer %u has no experts, and '%s.feed_forward_length' is missing",
                 in.file().path().c_str(), il, h.arch.c_str());
        }
        h.layers[il].feed_forward.n_expert = 0;
        h.layers[il].feed_forward.n_ff = n_ff[il];
    }
}

void read_leading_dense(const metadata & in, hparams & h) {
    const uint32_t n_dense = in.optional("leading_dense_block_count", 0, 0, h.n_layer());
    make_dense(in, h, [&](uint32_t il) { return il < n_dense; });
}

void read_shared_expert(const metadata & in, hparams & h, uint32_t fallback) {
    for (layer_spec & layer : h.layers) {
        layer.feed_forward.n_ff_shared = in.optional("expert_shared_feed_forward_length", fallback, 0, metadata::MAX_WIDTH * 4);
    }
}

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

void read_weights(const metadata & in, hparams & h) {
    for (layer_spec & layer : h.layers) {
        layer.feed_forward.sums_to_1 = in.flag("expert_weights_norm").value_or(false);
        layer.feed_forward.expert_scale = in.optional_number("expert_weights_scale", 0.0f, 0.0f, 1e6f);
    }
}

void share(hparams & h, const std::function<uint64_t(uint64_t)> & width) {
    for (layer_spec & layer : h.layers) {
        const uint64_t n = width(layer.feed_forward.n_ff_expert);
        layer.feed_forward.n_ff_shared = layer.feed_forward.n_expert > 0 ? static_cast<uint32_t>(n) : 0;
    }
}

void read_shared_count(const metadata & in, hparams & h, uint64_t least) {
    const uint64_t n_shared = in.required("expert_shared_count", least, 64);
    share(h, [&](uint64_t n_ff) { return n_shared * n_ff; });
}

arch_recipe recipe(const char * name, int rope_mode, const tensors & frame, const tensors & layer,
                   void (*read)(const metadata & in, hparams & h)) {
    arch_recipe r;
    r.name = name;
    r.rope_mode = rope_mode;
    r.frame = frame;
    r.layer = layer;
    r.read = read;
    return r;
}

arch_recipe with_draft_head(arch_recipe r, presence norm) {
    constexpr auto layers = with::draft_head;
    const auto embeddings = [&](const char * name, role to, scale s) {
        return tensor_spec{name, to, {extent::embd, extent::vocab, one}, presence::optional, layers, s};
    };
    r.has_draft_head = true;
    r.layer =
        r.layer +
        tensors{matrix("nextn.eh_proj.weight", role::draft_in, extent::embd_twice, extent::embd, presence::required, layers),
                vector_of("nextn.enorm.weight", role::draft_embd_norm, extent::embd, presence::required, layers),
                vector_of("nextn.hnorm.weight", role::draft_state_norm, extent::embd, presence::required, layers),
                embeddings("nextn.embed_tokens.weight", role::draft_embd, scale::none),
                vector_of("nextn.shared_head_norm.weight", role::draft_norm, extent::embd, norm, layers),
                embeddings("nextn.shared_head_head.weight", role::draft_output, scale::applied)};
    return r;
}

arch_recipe partial(arch_recipe r) {
    r.partial_rope = true;
    return r;
}

arch_recipe with_experts(arch_recipe r, gating_kind gating, decltype(arch_recipe::experts) experts) {
    r.gating = gating;
    r.experts = experts;
    return r;
}

} // namespace kvg
