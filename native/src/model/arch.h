// The table: architecture name -> what its tensors are called and how its layers are built.
#pragma once

#include <string>
#include <vector>

#include <ggml.h>

#include "model/hparams.h"

namespace kvg {

struct layer_weights {
    ggml_tensor * attn_norm = nullptr; // (n_embd)
    ggml_tensor * wq = nullptr;        // (n_embd, n_head * head_dim), ggml's order: innermost first
    ggml_tensor * wk = nullptr;        // (n_embd, n_head_kv * head_dim)
    ggml_tensor * wv = nullptr;
    ggml_tensor * wo = nullptr;
    ggml_tensor * bq = nullptr;
    ggml_tensor * bk = nullptr;
    ggml_tensor * bv = nullptr;
    ggml_tensor * bo = nullptr;
    ggml_tensor * ffn_norm = nullptr;
    ggml_tensor * ffn_gate = nullptr; // (n_embd, n_ff)
    ggml_tensor * ffn_up = nullptr;
    ggml_tensor * ffn_down = nullptr; // (n_ff, n_embd)
    ggml_tensor * ffn_gate_b = nullptr;
    ggml_tensor * ffn_up_b = nullptr;
    ggml_tensor * ffn_down_b = nullptr;
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
    ggml_tensor * layer_weights::* slot;
    extent in;  // ne[0]
    extent out; // ne[1]; none: a vector, which must be F32
    bool required;
};

struct arch_recipe {
    const char * name;
    int rope_mode;
    std::vector<layer_tensor> layer;
};

// error(KVG_UNSUPPORTED) with the names there are
const arch_recipe & find_arch(const std::string & name);

uint32_t width(extent e, const hparams & h, const layer_spec & layer);

} // namespace kvg
