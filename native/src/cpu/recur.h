// Recurrent layers on the CPU: a short convolution over the last inputs, and linear attention with a state that decays.
//
// Gated delta net (Yang, Kautz and Hatamizadeh 2024) and Mamba-2 (Dao and Gu 2024) are one recurrence. A head's state S has a row for
// each dimension of V. For each token: S decays, takes d times K into each row, and gives the row's product with Q, where d is
// (V - S K) * beta in the first and V * beta in the second. Rows don't depend on each other, so a thread takes some rows through all
// tokens. Many tokens go through a state together, by products of matrices (chunks.inl): the same sums in another order.
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
    const float * skip;  // (n_head): V times it is added to the results; or nullptr
    float * out;         // (head_dim_v, n_head, n_tokens)
    float scale;         // of the results, but for what skips the state
    uint32_t head_dim_k; // a multiple of lanes
    uint32_t head_dim_v; // a multiple of RECUR_ROWS
    uint32_t n_head;
    uint32_t n_head_k;
    bool in_turn;        // K's heads: h % n_head_k
    bool delta;          // V less what the state gives for K
    bool decay_by_width; // decay: (head_dim_k, n_head)
};

// A row of results, with RMS norm, and what its gate lets through.
struct gated_row {
    const float * x;
    const float * gate;
    const float * weight; // of the norm
    float * out;
    uint32_t n; // a multiple of lanes
    float eps;
    bool silu;       // of the gate, else sigmoid
    bool gate_first; // the norm is of what the gate lets through
};

// Rows of the states of some heads of V that have the same head of K.
struct recall_piece {
    uint32_t head_k;
    uint32_t first_head; // of those of head_k
    uint32_t n_heads;
    uint32_t row_begin; // whole vectors
    uint32_t row_end;
};

constexpr uint32_t RECUR_TAPS = 8;
constexpr uint32_t RECUR_ROWS = 4;   // of a state that are worked on together
constexpr uint32_t RECUR_CHUNK = 32; // tokens that go through a state together

// Whether a run goes by chunks: it has tokens enough between states that are wanted.
static inline bool recur_by_chunks(const recur_run & run) {
    constexpr uint32_t LEAST = 8;
    uint32_t n_parts = 1;
    for (uint32_t t = 0; run.after && t < run.n; ++t) {
        n_parts += run.after[t] != nullptr;
    }
    return run.n >= LEAST * n_parts;
}
// Floats of scratch that a thread needs for chunks.
static constexpr size_t recall_scratch_floats(uint32_t head_dim_k) {
    return RECUR_CHUNK * (6 * size_t{head_dim_k} + 5 * RECUR_CHUNK + 1) + head_dim_k;
}
// The head of K that a head of V has, and the head of V that is a head of K's i-th.
static inline uint32_t recall_head_k(const recall_job & job, uint32_t head) {
    return job.in_turn ? head % job.n_head_k : head / (job.n_head / job.n_head_k);
}
static inline uint32_t recall_head(const recall_job & job, uint32_t head_k, uint32_t i) {
    return job.in_turn ? i * job.n_head_k + head_k : head_k * (job.n_head / job.n_head_k) + i;
}

} // namespace kvg
