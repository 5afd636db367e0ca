// What recipes are made of: lists of tensors.
#include "model/recipes.h"

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

tensors with_scales(scale how, tensors all) {
    for (tensor_spec & t : all) {
        t.scale = t.scale == scale::none ? scale::none : how;
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

tensors ungated() {
    return {
        matrix("ffn_up.weight", role::ffn_up, extent::embd, extent::ff, presence::required, with::dense),
        matrix("ffn_down.weight", role::ffn_down, extent::ff, extent::embd, presence::required, with::dense),
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

} // namespace kvg
