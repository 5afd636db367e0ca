// The table: architecture name -> what its tensors are called and how its layers are built.
#pragma once

#include <array>
#include <string>
#include <vector>

#include <ggml.h>

#include "model/hparams.h"
#include "model/layer_spec.h"

namespace kvg {

// What a layer's tensor is for. Shapes in ggml's order, innermost first.
enum class role {
    attn_norm, // (n_embd)
    wq,        // (n_embd, n_head * head_dim_k)
    wk,        // (n_embd, n_head_kv * head_dim_k)
    wv,        // (n_embd, n_head_kv * head_dim_v)
    wo,        // (n_head * head_dim_v, n_embd)
    wq_bias,
    wk_bias,
    wv_bias,
    wo_bias,
    ffn_norm, // (n_embd)
    ffn_gate, // (n_embd, n_ff)
    ffn_up,
    ffn_down, // (n_ff, n_embd)
    ffn_gate_bias,
    ffn_up_bias,
    ffn_down_bias,
    count
};

// A layer's tensors by role; nullptr for those that it hasn't.
class layer_weights {
public:
    ggml_tensor * operator[](role r) const { return tensors_[static_cast<size_t>(r)]; }
    ggml_tensor *& operator[](role r) { return tensors_[static_cast<size_t>(r)]; }

private:
    std::array<ggml_tensor *, static_cast<size_t>(role::count)> tensors_ = {};
};

// A width that a tensor's dimension takes from the hparams.
enum class extent {
    none,
    embd,
    q,
    k,
    v,
    out, // of what attention gives
    ff
};

struct layer_tensor {
    const char * suffix; // blk.<layer>.<suffix>
    kvg::role role;
    extent in;  // ne[0]
    extent out; // ne[1]; none: a vector, which must be F32
    bool required;
};

struct arch_recipe {
    const char * name;
    int rope_mode;
    norm_kind norm;
    mixing_kind mixing;
    feed_forward_kind feed_forward;
    std::vector<layer_tensor> layer;
};

// error(KVG_UNSUPPORTED) with the names there are
const arch_recipe & find_arch(const std::string & name);

uint32_t width(extent e, const hparams & h, const layer_spec & layer);

} // namespace kvg
