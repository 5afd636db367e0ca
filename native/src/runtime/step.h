// One decode: takes cells for the batch, computes its ubatches, and keeps the cells only if all of them succeed.
#pragma once

#include <cstdint>
#include <vector>

#include "backends.h"
#include "graph/decoder.h"
#include "kvgraph.h"
#include "memory/kv_cache.h"
#include "memory/last_states.h"
#include "model/weights.h"
#include "runtime/batch.h"
#include "runtime/graph_run.h"
#include "runtime/inputs.h"
#include "runtime/reservation.h"
#include "runtime/upkeep.h"

namespace kvg {

struct step_params {
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_outputs; // most of one micro-batch
    int n_threads;      // for one token
    int n_threads_batch;
    uint32_t align; // of attended spans
};

class step {
public:
    // The arguments must outlive this object. last: gets the states of decoded tokens; nullptr: nothing drafts by them
    step(const model & model, kv_cache & cache, const backends & backends, decoder & decoder, upkeep & upkeep,
         const step_params & params, last_states * last)
        : model_(model), cache_(cache), backends_(backends), decoder_(decoder), upkeep_(upkeep), params_(params),
          run_(backends, decoder, params.n_threads, params.n_threads_batch), inputs_(model.hparams()),
          n_attended_(cache.groups().size()), last_(last) {}

    // returns the number of rows written to `output`
    int64_t decode(const kvg_batch & batch, const kvg_output * output);
    // the same for one token at the end of a sequence
    int64_t append(int64_t seq, int64_t token, const kvg_output * output);
    // Removes the tokens of the last decode. Does nothing when that decode failed, or was undone already.
    void undo();
    // the number of cells of a group that the last graph attended over
    uint32_t n_attended(size_t group) const { return n_attended_[group]; }

private:
    void check_output(const batch & batch, const kvg_output & output) const;
    micro_batch next(const batch & batch, uint32_t begin) const;
    const decode_graph & compute(const batch & batch, const micro_batch & ubatch, const reservation & reserved,
                                 const state_segments & segments);
    void run(const decode_graph & graph, uint32_t n_tokens);
    void drop_checkpoints(const batch & batch, const std::vector<first_position> & firsts);
    void observe(const batch & batch, const micro_batch & ubatch);
    void tell_taps(const batch & batch, const micro_batch & ubatch, const reservation & reserved);
    void keep_states(const decode_graph & graph, const batch & batch, const micro_batch & ubatch, const reservation & reserved);
    void write_outputs(const decode_graph & graph, const kvg_output & output, size_t row) const;
    void write_scores(const kvg_output & output, size_t n_rows) const;

    const model & model_;
    kv_cache & cache_;
    const backends & backends_;
    decoder & decoder_;
    upkeep & upkeep_;
    step_params params_;
    graph_run run_;
    graph_inputs inputs_;
    std::vector<uint32_t> n_attended_;
    last_states * last_;
    std::vector<first_position> decoded_; // what the last decode added; empty if it failed, or repaired
    cell_changes repaired_;               // what the last decode changed, if it repaired
};

} // namespace kvg
