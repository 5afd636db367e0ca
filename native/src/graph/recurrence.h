// What layers with a state are made of: which operations, and where their states are.
#pragma once

#include "graph/builder.h"

namespace kvg {

enum class recur_kind {
    ggml, // ggml's operations; states are on the device that runs them
    own,  // this library's own on the CPU; states are in host memory
};

// Of one layer. Each operation takes the micro-batch's tokens, and states go on by what it is given.
class recurrence {
public:
    virtual ~recurrence() = default;
    virtual recur_kind kind() const = 0;
    // Of the last n_taps inputs of each channel, through SiLU unless the layer is a short convolution. x: F32 (n_channels, n_tokens); taps:
    // F32 (n_taps, n_channels); bias: F32 (n_channels), or nullptr. Returns (n_channels, n_tokens).
    virtual ggml_tensor * convolve(builder & b, ggml_tensor * x, ggml_tensor * taps, ggml_tensor * bias) = 0;
    // Heads of Q and K, each divided by its length. x: F32 (2 k_width, n_tokens). Returns the same shape.
    virtual ggml_tensor * to_unit(builder & b, ggml_tensor * x) = 0;
    // A gated delta net. q, k: F32 (head_dim_k, n_head_k, n_tokens); v: (head_dim_v, n_head, n_tokens); decay, beta: (n_head, n_tokens), where
    // dimensions of K decay by themselves decay: (head_dim_k, n_head, n_tokens). Returns (head_dim_v, n_head, n_tokens).
    virtual ggml_tensor * delta(builder & b, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * decay,
                                ggml_tensor * beta) = 0;
    // Mamba-2. dt: (n_head, n_tokens), the time step before its softplus; a: F32 (1, n_head), what it is multiplied by to decay; skip: F32, a
    // number for each head, or nullptr. Returns (head_dim_v, n_head, n_tokens).
    virtual ggml_tensor * scan(builder & b, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * dt,
                               ggml_tensor * a, ggml_tensor * skip) = 0;
};

} // namespace kvg
