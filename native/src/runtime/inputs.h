// What a decode graph is told of a micro-batch: tokens, positions, cells, and what each token sees.
#pragma once

#include <cstdint>
#include <vector>

#include "graph/attended.h"
#include "graph/frame.h"
#include "memory/kv_cache.h"
#include "memory/last_states.h"
#include "runtime/batch.h"
#include "runtime/reservation.h"
#include "runtime/seen_mask.h"

namespace kvg {

// Tokens of a batch that are computed by one graph.
struct micro_batch {
    uint32_t begin; // first token
    uint32_t n;
    uint32_t n_outputs;
};

// From the lowest to the highest cell that a token of the micro-batch sees. Its bounds are multiples of align.
cell_span attended_span(const cells & cells, const batch & batch, const micro_batch & ubatch, uint32_t align);

class graph_inputs {
public:
    explicit graph_inputs(const hparams & h) : temperature_(h.temperature), tells_distances_(h.tells_distances()) {}
    // spans, segments: as the graph has them. reserved: the tokens' cells; nullptr where they take none. attended: its order,
    // ranges and positions are set
    void set(decode_graph & graph, const kv_cache & cache, const batch & batch, const micro_batch & ubatch,
             const reservation * reserved, const std::vector<cell_span> & spans, const state_segments & segments,
             std::vector<attended_cells> & attended);

    // And where the state before each token is, in a graph of a model with a draft head that doesn't draft.
    void set_previous(decode_graph & graph, const last_states & last, const batch & batch, const micro_batch & ubatch);

private:
    void set_positions(const cells & cells, const batch & batch, const micro_batch & ubatch, const cell_span & span,
                       attended_cells & attended);
    void set_mask(ggml_tensor * mask, const cells & cells, const batch & batch, const micro_batch & ubatch,
                  const cell_span & span, attended_cells & attended);
    void set_states(decode_graph & graph, const state_segments & segments);
    void set_temperatures(ggml_tensor * tensor, const batch & batch, const micro_batch & ubatch);

    temperature_spec temperature_;
    bool tells_distances_;
    seen_mask mask_;
    std::vector<int64_t> slot_ids_; // scratch, kept
    std::vector<float> temperatures_;
    std::vector<int32_t> output_ids_;
    std::vector<int32_t> previous_ids_;
    std::vector<float> states_;
};

} // namespace kvg
