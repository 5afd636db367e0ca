// What the graphs need to know of a model, read from its metadata.
#pragma once

#include <cstdint>
#include <string>

#include "model/gguf_file.h"

namespace kvg {

// Rotary embedding of one model; the same for every layer of the architectures there are so far.
struct rope_params {
    int mode;         // GGML_ROPE_TYPE_*
    int n_rot;        // rotated dimensions, <= head_dim
    int n_ctx_orig;   // context length before any scaling
    float freq_base;  //
    float freq_scale; // position multiplier: 1 / linear scaling factor
};

struct hparams {
    std::string arch;
    uint32_t n_layer;
    uint32_t n_embd;
    uint32_t n_head;
    uint32_t n_head_kv;
    uint32_t head_dim;
    uint32_t n_ff;
    uint32_t n_vocab;
    uint32_t n_ctx_train;
    float rms_eps;
    rope_params rope;

    uint32_t n_embd_q() const { return n_head * head_dim; }
    uint32_t n_embd_kv() const { return n_head_kv * head_dim; }
};

// error(KVG_MODEL_LOAD) for missing or impossible values, error(KVG_UNSUPPORTED) for what no recipe here can run.
hparams read_hparams(const gguf_file & file);

} // namespace kvg
