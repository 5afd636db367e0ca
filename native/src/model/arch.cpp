#include "model/arch.h"

#include "error.h"

namespace kvg {

static const std::vector<arch_recipe> recipes = {
    // Llama 1-3, Mistral, TinyLlama, SmolLM, ...
    {"llama",
     GGML_ROPE_TYPE_NORMAL,
     norm_kind::rms,
     mixing_kind::attention,
     feed_forward_kind::swiglu,
     {
         {"attn_norm.weight", role::attn_norm, extent::embd, extent::none, true},
         {"attn_q.weight", role::wq, extent::embd, extent::q, true},
         {"attn_k.weight", role::wk, extent::embd, extent::k, true},
         {"attn_v.weight", role::wv, extent::embd, extent::v, true},
         {"attn_output.weight", role::wo, extent::out, extent::embd, true},
         {"attn_q.bias", role::wq_bias, extent::q, extent::none, false},
         {"attn_k.bias", role::wk_bias, extent::k, extent::none, false},
         {"attn_v.bias", role::wv_bias, extent::v, extent::none, false},
         {"attn_output.bias", role::wo_bias, extent::embd, extent::none, false},
         {"ffn_norm.weight", role::ffn_norm, extent::embd, extent::none, true},
         {"ffn_gate.weight", role::ffn_gate, extent::embd, extent::ff, true},
         {"ffn_up.weight", role::ffn_up, extent::embd, extent::ff, true},
         {"ffn_down.weight", role::ffn_down, extent::ff, extent::embd, true},
         {"ffn_gate.bias", role::ffn_gate_bias, extent::ff, extent::none, false},
         {"ffn_up.bias", role::ffn_up_bias, extent::ff, extent::none, false},
         {"ffn_down.bias", role::ffn_down_bias, extent::embd, extent::none, false},
     }},
};

const arch_recipe & find_arch(const std::string & name) {
    std::string known;
    for (const arch_recipe & recipe : recipes) {
        if (name == recipe.name) {
            return recipe;
        }
        known += std::string(known.empty() ? "" : ", ") + recipe.name;
    }
    fail(KVG_UNSUPPORTED, "architecture '%s' has no recipe yet; there are: %s", name.c_str(), known.c_str());
}

uint32_t width(extent e, const hparams & h, const layer_spec & layer) {
    switch (e) {
    case extent::embd:
        return h.n_embd;
    case extent::q:
        return layer.q_width();
    case extent::k:
        return layer.k_width();
    case extent::v:
        return layer.v_width();
    case extent::out:
        return layer.out_width();
    case extent::ff:
        return layer.n_ff;
    case extent::none:
        break;
    }
    return 1;
}

} // namespace kvg
