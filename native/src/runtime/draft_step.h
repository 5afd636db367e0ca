// Drafts by the model's draft head or its assistant: tokens that may follow texts, one after the other.
#pragma once

#include <cstdint>
#include <vector>

#include "backends.h"
#include "graph/decoder.h"
#include "kvgraph.h"
#include "memory/kv_cache.h"
#include "memory/last_states.h"
#include "model/weights.h"
#include "runtime/graph_run.h"
#include "runtime/inputs.h"
#include "runtime/reservation.h"
#include "runtime/step.h"
#include "runtime/upkeep.h"

namespace kvg {

// A text to draft for.
struct drafted_text {
    size_t at; // its place in the request
    int32_t seq;
    int32_t token; // the last one of the text, which is not decoded yet
    uint32_t n;    // tokens to draft
};

class draft_step {
public:
    // The arguments must outlive this object. last: the states that drafts begin with
    draft_step(const model & model, kv_cache & cache, const backends & backends, decoder & decoder, upkeep & upkeep,
               const step_params & params, const last_states & last)
        : model_(model), cache_(cache), backends_(backends), decoder_(decoder), upkeep_(upkeep), params_(params), last_(last),
          run_(backends, decoder, params.n_threads, params.n_threads_batch), inputs_(model.hparams()) {}

    // As kvg_draft has it. Returns the number of rows written to `output`. The cells that a draft head needs are empty again afterwards.
    int64_t draft(const kvg_draft_request & in, const kvg_output * output);

private:
    // The tokens of all texts, step after step: those of one step are neighbours, in the order of the texts. A draft head's tokens stand one
    // behind the other, an assistant's all where the text's last token will, as none of them has a cell.
    struct drafted_batch {
        drafted_batch(const std::vector<drafted_text> & texts, const kv_cache & cache, bool has_cells);
        // of steps [begin, end)
        kvg_batch view(size_t begin, size_t end) const;
        uint32_t n_tokens() const { return begins.back(); }
        uint32_t n_steps() const { return static_cast<uint32_t>(begins.size()) - 1; }

        std::vector<uint32_t> begins; // of each step, and the end
        std::vector<int32_t> token;
        std::vector<int32_t> pos;
        std::vector<int32_t> seq_begin;
        std::vector<int32_t> seq;
        std::vector<uint8_t> logits;
    };
    std::vector<drafted_text> read(const kvg_draft_request & in) const;
    void begin_states(const std::vector<drafted_text> & texts);
    void by_head(drafted_batch & tokens, std::vector<drafted_text> texts, const kvg_draft_request & in,
                 const kvg_output * output);
    void by_assistant(drafted_batch & tokens, std::vector<drafted_text> texts, const kvg_draft_request & in,
                      const kvg_output * output);
    void compute(const batch & batch, const micro_batch & ubatch, const reservation * reserved);
    std::vector<drafted_text> take(uint32_t k, drafted_batch & tokens, const std::vector<drafted_text> & texts,
                                   const kvg_draft_request & in, const kvg_output * output);

    const model & model_;
    kv_cache & cache_;
    const backends & backends_;
    decoder & decoder_;
    upkeep & upkeep_;
    step_params params_;
    const last_states & last_;
    graph_run run_;
    graph_inputs inputs_;
    // of the step that is computed: (n_texts, n_embd) and (n_texts, n_vocab)
    std::vector<float> states_;
    std::vector<float> logits_;
};

} // namespace kvg
