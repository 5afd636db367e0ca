// Recurrent layers on the CPU: a short convolution over the last inputs, and linear attention with a state that decays.
//
// Gated delta net (Yang, Kautz and Hatamizadeh 2024) and Mamba-2 (Dao and Gu 2024) are one recurrence. A head's state S has a row for
// each dimension of V. For each token: S decays, takes d times K into each row, and gives the row's product with Q, where d is
// (V - S K) * beta in the first and V * beta in the second. Rows don't depend on each other, so a thread takes some rows through all
// tokens, and a state is read and written once for each run.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvg {

// Tokens of one sequence, in order, and the states before and after them. A state is a row: of all recurrent layers, one after the other.
struct recur_run {
    const float * from; // nullptr: zeros
    float * to;         // may be `from`
    const uint32_t * tokens;
    uint32_t n;            // >= 1
    float * const * after; // of each token: where else the state after it is written, or nullptr; nullptr: nowhere
};

struct recur_runs {
    const recur_run * runs;
    uint32_t n;
    uint64_t offset; // floats of a row before the layer's own
};

// A number for each channel and token: F32, tokens `stride` floats apart.
struct recur_input {
    const float * data;
    uint64_t stride;
    const float * of(uint32_t token) const { return data + token * stride; }
};

struct convolve_job {
    recur_runs runs;     // states: the last n_taps - 1 inputs, oldest first
    recur_input x;       //
    const float * taps;  // (n_taps, n_channels): of each channel, the token's own is the last
    const float * bias;  // (n_channels), or nullptr
    float * out;         // (n_channels, n_tokens)
    uint32_t n_taps;     // at most RECUR_TAPS
    uint32_t n_channels; // a multiple of lanes
    bool silu;
};

struct recall_job {
    recur_runs runs;     // states: (head_dim_k, head_dim_v, n_head), from `offset` on
    recur_input q;       // (head_dim_k, n_head_k): head h of V has Q and K of head h % n_head_k or h / (n_head / n_head_k)
    recur_input k;       //
    recur_input v;       // (head_dim_v, n_head)
    recur_input decay;   // (n_head): the state is multiplied by e^decay; or (head_dim_k, n_head)
    recur_input beta;    // (n_head)
    float * out;         // (head_dim_v, n_head, n_tokens)
    float scale;         // of the results
    uint32_t head_dim_k; // a multiple of lanes
    uint32_t head_dim_v; // a multiple of RECUR_ROWS
    uint32_t n_head;
    uint32_t n_head_k;
    bool in_turn;        // K's heads: h % n_head_k
    bool delta;          // V less what the state gives for K
    bool decay_by_width; // decay: (head_dim_k, n_head)
};

constexpr uint32_t RECUR_TAPS = 8;
constexpr uint32_t RECUR_ROWS = 4; // of a state that are worked on together

} // namespace kvg
