#include "model/arch.h"

#include "error.h"

namespace kvg {

using lw = layer_weights;

static const std::vector<arch_recipe> recipes = {
    // Llama 1-3, Mistral, TinyLlama, SmolLM, ...
    {"llama",
     GGML_ROPE_TYPE_NORMAL,
     {
         {"attn_norm.weight", &lw::attn_norm, extent::embd, extent::none, true},
         {"attn_q.weight", &lw::wq, extent::embd, extent::q, true},
         {"attn_k.weight", &lw::wk, extent::embd, extent::k, true},
         {"attn_v.weight", &lw::wv, extent::embd, extent::v, true},
         {"attn_output.weight", &lw::wo, extent::out, extent::embd, true},
         {"attn_q.bias", &lw::bq, extent::q, extent::none, false},
         {"attn_k.bias", &lw::bk, extent::k, extent::none, false},
         {"attn_v.bias", &lw::bv, extent::v, extent::none, false},
         {"attn_output.bias", &lw::bo, extent::embd, extent::none, false},
         {"ffn_norm.weight", &lw::ffn_norm, extent::embd, extent::none, true},
         {"ffn_gate.weight", &lw::ffn_gate, extent::embd, extent::ff, true},
         {"ffn_up.weight", &lw::ffn_up, extent::embd, extent::ff, true},
         {"ffn_down.weight", &lw::ffn_down, extent::ff, extent::embd, true},
         {"ffn_gate.bias", &lw::ffn_gate_b, extent::ff, extent::none, false},
         {"ffn_up.bias", &lw::ffn_up_b, extent::ff, extent::none, false},
         {"ffn_down.bias", &lw::ffn_down_b, extent::embd, extent::none, false},
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
