// Rows of K rotated in F32 and rounded again: for types that ggml doesn't rotate where they lie, and where noise must go in between.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/kv_cache.h"
#include "model/hparams.h"

namespace kvg {

// By what, beside positions.
struct rotation {
    const rope_params & params;
    ggml_tensor * freq_factors; // (n_rot / 2) or nullptr
    const hadamard * mixed;     // or nullptr
};

// Some of the cells whose K waits.
struct waiting_rows {
    std::vector<uint32_t> cells;
    std::vector<int32_t> by;    // positions
    std::vector<int32_t> seeds; // see dither()
};

// As many rows as bounded scratch takes in F32, at least one.
uint32_t max_rotated_rows(const kv_cache & cache);
// All that wait, at most max_rotated_rows() at a time.
std::vector<waiting_rows> list_waiting(const kv_cache & cache);
// The shift of a cell, unless a fault for tests rotates it the other way.
int32_t shift_of(const cells & cells, uint32_t i);

// The same as inputs of a graph, which layers share. from, to: rows of K, I32 and I64.
struct row_inputs {
    ggml_tensor * from;
    ggml_tensor * to;
    ggml_tensor * by;
    ggml_tensor * seeds; // nullptr: rounded without noise
};

// For update_graph: nodes of rotate_rows with what hangs on them, a third of its tensors.
constexpr size_t ROTATE_NODES = 8;

// Returns the node to run.
ggml_tensor * rotate_rows(ggml_context * ctx, ggml_tensor * k, int64_t head_dim, const row_inputs & rows, const rotation & how);

} // namespace kvg
