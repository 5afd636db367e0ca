#include "runtime/step.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "cpu/kernel.h"
#include "error.h"
#include "fault.h"
#include "memory/slots.h"
#include "parallel.h"
#include "runtime/batch_checkpoints.h"
#include "runtime/bounded.h"
#include "runtime/state_step.h"

namespace kvg {

// What the softmax of a row says.
static kvg_score score_of(const float * logits, uint32_t n_vocab) {
    const softmax_parts parts = kernels_here()[0]->attend.softmax(logits, n_vocab);
    const float log_sum = std::log(parts.sum); // of what is relative to the greatest
    return {static_cast<int32_t>(parts.best), -log_sum, parts.greatest + log_sum};
}

namespace {

// Of a decode that fails nothing was observed.
class observing {
public:
    explicit observing(decoder & of) : of_(of) { of.begin_observing(); }
    ~observing() {
        if (!is_kept_) {
            of_.begin_observing();
        }
    }
    void keep() { is_kept_ = true; }

private:
    decoder & of_;
    bool is_kept_ = false;
};

// Cells of a batch that failed are given to others: no device may still write into them.
struct at_rest {
    const backends & of;
    ~at_rest() { of.wait(); }
};

} // namespace

void step::check_output(const batch & batch, const kvg_output & output) const {
    if (output.n_rows < batch.n_outputs()) {
        fail(KVG_INVALID_ARGUMENT, "%u outputs are asked for and the buffers have room for %lld", batch.n_outputs(),
             static_cast<long long>(output.n_rows));
    }
    const hparams & h = model_.hparams();
    if (!h.is_last() && (output.logits || output.score)) {
        fail(KVG_UNSUPPORTED, "layers %u to %u of %u have no logits: the last stage does", h.here.begin, h.here.end - 1,
             h.n_layer());
    }
    if (h.encodes && (output.logits || output.score)) {
        fail(KVG_UNSUPPORTED, "architecture '%s' is an encoder and has no logits: ask for embeddings", model_.arch().name);
    }
    if (output.score && !output.logits) {
        fail(KVG_INVALID_ARGUMENT, "scores are asked for without logits");
    }
}

// As many tokens as a graph may have, and as may ask for their output there; none at the end of the batch.
micro_batch step::next(const batch & batch, uint32_t begin) const {
    micro_batch ubatch = {begin, 0, 0};
    const uint32_t end = begin + std::min(params_.n_ubatch, batch.n_tokens() - begin);
    for (uint32_t i = begin; i < end && ubatch.n_outputs + batch.is_output(i) <= params_.n_outputs; ++i) {
        ubatch.n_outputs += batch.is_output(i);
        ++ubatch.n;
    }
    return ubatch;
}

int64_t step::decode(const kvg_batch & in, const kvg_output * output) {
    decoded_.clear();
    repaired_ = {};
    observing observed(decoder_);
    upkeep_.require_intact();
    const batch batch(in, model_.hparams(), params_.n_batch, cache_);
    seen_guard guard(cache_);
    guard.hold(batch);
    cache_.require_cells(std::vector<uint32_t>(cache_.groups().size(), batch.n_tokens()), "the batch"); // before anything moves
    if (output) {
        check_output(batch, *output);
    }
    if (in.n_observed > 0 && !decoder_.can_observe()) {
        fail(KVG_UNSUPPORTED, "what tokens attend to is known where the CPU computes attention, with flash_attn=\"auto\"");
    }
    upkeep_.before_decode(batch.n_tokens());
    upkeep_.tell_waiting(decoder_);

    fault_point("cells");
    reservation reserved(cache_, batch);
    guard.release();
    state_step states(cache_, batch);
    states.take();
    size_t row = 0;
    const at_rest rest = {backends_};
    for (micro_batch ubatch = next(batch, 0); ubatch.n > 0; ubatch = next(batch, ubatch.begin + ubatch.n)) {
        reserved.put(ubatch.begin, ubatch.n);
        decoder_.set_runs(states.runs(ubatch.begin, ubatch.n));
        const bool any_there = cache_.states().rows().any_on_device();
        const decode_graph & graph = compute(batch, ubatch, reserved, any_there ? states.segments() : state_segments());
        if (output && ubatch.n_outputs > 0) {
            write_outputs(graph, *output, row);
            row += ubatch.n_outputs;
        }
        keep_states(graph, batch, ubatch, reserved);
    }
    decoder_.wait();
    if (output && output->score) {
        write_scores(*output, row);
    }
    if (model_.hparams().encodes) {
        return static_cast<int64_t>(row); // no later token may see these, so that none stay in the cache
    }
    std::vector<first_position> decoded = batch.first_positions();
    batch_checkpoints checkpoints(cache_, batch);
    checkpoints.hold(states);
    states.commit(); // the last that may fail
    cell_changes changes = reserved.commit();
    drop_checkpoints(batch, decoded);
    for (const first_position & first : decoded) {
        for (const std::shared_ptr<tap> & each : decoder_.taps().all()) {
            if (each->seq() == first.seq) {
                each->decoded(first.pos);
            }
        }
    }
    if (batch.repairs()) {
        repaired_ = std::move(changes);
    } else {
        decoded_ = std::move(decoded);
    }
    observed.keep();
    checkpoints.commit();
    return static_cast<int64_t>(row);
}

// Those of other texts than the sequences now have. firsts: of each of them
void step::drop_checkpoints(const batch & batch, const std::vector<first_position> & firsts) {
    if (!batch.repairs()) {
        for (const first_position & first : firsts) {
            cache_.drop_within(first.seq, first.pos, -1);
        }
        return;
    }
    for (uint32_t i = 0; i < batch.n_tokens(); ++i) {
        const int32_t pos = batch.positions()[i];
        each_member(batch.set(i).data(), batch.set(i).size(), [&](uint32_t seq) {
            if (batch.is_below(seq, pos)) {
                cache_.drop_over(seq, pos);
            } else {
                cache_.drop_within(seq, pos, -1);
            }
            if (batch.is_checkpoint(i)) {
                cache_.drop_within(seq, pos, int64_t{pos} + 2); // the batch makes it anew
            }
        });
    }
}

void step::undo() {
    cache_.take_back(decoded_);
    decoded_.clear();
    if (repaired_.slots.empty()) {
        return;
    }
    const cells & cells = cache_.groups().front().cells();
    for (const uint32_t slot : repaired_.slots.front()) {
        const int32_t pos = cells.pos(slot);
        each_member(cells.set(slot).data(), cells.n_words(), [&](uint32_t seq) {
            cache_.drop_over(seq, pos);
            cache_.drop_within(seq, pos, int64_t{pos} + 2); // a checkpoint that the batch has made
        });
    }
    repaired_.undo(cache_, repaired_.slots.front().size());
    repaired_ = {};
}

const decode_graph & step::compute(const batch & batch, const micro_batch & ubatch, const reservation & reserved,
                                   const state_segments & segments) {
    std::vector<cell_span> spans;
    for (size_t g = 0; g < cache_.groups().size(); ++g) {
        const cells & cells = cache_.groups()[g].cells();
        spans.push_back(attended_span(cells, batch, ubatch, params_.align));
        n_attended_[g] = cache_.groups()[g].layers().empty() ? 0 : std::min(spans[g].n, cells.size() - spans[g].begin);
    }
    // without an output the last layer doesn't attend
    const bool is_observed = batch.observed_from() < ubatch.begin + ubatch.n;
    decode_graph & graph = decoder_.prepare(ubatch.n, std::max(ubatch.n_outputs, uint32_t{is_observed}), spans, segments);
    inputs_.set(graph, cache_, batch, ubatch, &reserved, spans, segments, decoder_.attended());
    if (graph.previous) {
        inputs_.set_previous(graph, *last_, batch, ubatch);
    }
    if (carrier * carrier = decoder_.carrier()) {
        carrier->expect(spans, reserved.slots_of(ubatch.begin, ubatch.n));
    }
    tell_taps(batch, ubatch, reserved);
    observe(batch, ubatch);
    run_.compute(graph, ubatch.n);
    return graph;
}

void step::observe(const batch & batch, const micro_batch & ubatch) {
    if (decoder_.can_observe()) {
        const uint32_t from = std::max(batch.observed_from(), ubatch.begin) - ubatch.begin;
        decoder_.observe(std::min(from, ubatch.n), ubatch.n, batch.observes_peaks());
    }
}

// One token of a sequence is not taken while the graph runs: to stop it after each layer would take longer than what it hides.
// Nor is what repairs: it doesn't come in the order of its positions.
void step::tell_taps(const batch & batch, const micro_batch & ubatch, const reservation & reserved) {
    for (const std::shared_ptr<tap> & each : decoder_.taps().all()) {
        const auto has = [&](uint32_t i) { return (batch.set(i)[each->seq() / 64] >> (each->seq() % 64) & 1) != 0; };
        uint32_t n = 0;
        for (uint32_t i = 0; !batch.repairs() && i < batch.n_tokens() && n < 2; ++i) {
            n += has(i);
        }
        std::vector<int32_t> positions;
        std::vector<std::vector<uint32_t>> cells(cache_.groups().size());
        for (uint32_t i = ubatch.begin; n == 2 && i < ubatch.begin + ubatch.n; ++i) {
            if (has(i)) {
                positions.push_back(batch.positions()[i]);
                for (size_t g = 0; g < cells.size(); ++g) {
                    cells[g].push_back(reserved.slots(g)[i]);
                }
            }
        }
        each->expect(std::move(positions), std::move(cells));
    }
}

// Those that a draft, or the next token, may begin with: behind tokens that are asked for, and, for a draft head, behind the last one of each
// sequence.
void step::keep_states(const decode_graph & graph, const batch & batch, const micro_batch & ubatch,
                       const reservation & reserved) {
    if (!last_) {
        return;
    }
    decoder_.wait();
    const size_t n_bytes = model_.hparams().n_embd * sizeof(float);
    seq_set behind = cache_.groups().front().cells().make_set(); // sequences with a later token
    const ggml_tensor * states = graph.normed ? graph.normed : graph.embd;
    uint32_t column = graph.normed ? ubatch.n : ubatch.n_outputs;
    for (uint32_t i = ubatch.n; i-- > 0;) {
        const seq_set & set = batch.set(ubatch.begin + i);
        bool is_last = false;
        for (size_t w = 0; w < set.size(); ++w) {
            is_last = is_last || (set[w] & ~behind[w]) != 0;
            behind[w] |= set[w];
        }
        const bool is_output = batch.is_output(ubatch.begin + i);
        column -= graph.normed || is_output;
        if (is_output || (graph.normed && is_last)) {
            float * row = last_->put(reserved.slots(0)[ubatch.begin + i]);
            ggml_backend_tensor_get(states, row, column * n_bytes, n_bytes);
        }
    }
}

// The last micro-batch's, from a row on.
void step::write_outputs(const decode_graph & graph, const kvg_output & output, size_t row) const {
    if (output.embd) {
        ggml_backend_tensor_get(graph.embd, output.embd + row * model_.hparams().n_embd, 0, ggml_nbytes(graph.embd));
    }
    if (output.logits) {
        ggml_backend_tensor_get(graph.logits, output.logits + row * model_.hparams().n_vocab, 0, ggml_nbytes(graph.logits));
    }
}

// Of all rows, once their logits are written.
void step::write_scores(const kvg_output & output, size_t n_rows) const {
    constexpr size_t SHARED_LOGITS = size_t{1} << 19; // fewer take less time than it takes to start a thread
    const uint32_t n_vocab = model_.hparams().n_vocab;
    const size_t n_threads = n_rows * n_vocab < SHARED_LOGITS ? 1 : static_cast<size_t>(params_.n_threads_batch);
    parallel_for(n_rows, n_threads, [&](size_t i) { output.score[i] = score_of(output.logits + i * n_vocab, n_vocab); });
}

int64_t step::append(int64_t seq, int64_t token, const kvg_output * output) {
    if (model_.hparams().encodes) {
        fail(KVG_UNSUPPORTED, "architecture '%s' is an encoder: a text can't go on, decode all of it at once",
             model_.arch().name);
    }
    decoded_.clear();
    repaired_ = {};
    const int64_t last = cache_.seq_pos_max(seq);
    const auto id = static_cast<int32_t>(bounded("token", token, 0, int64_t{model_.hparams().n_vocab} - 1));
    const auto pos = static_cast<int32_t>(bounded("position", last + 1, 0, std::numeric_limits<int32_t>::max()));
    const auto seq_id = static_cast<int32_t>(seq);
    const int32_t seq_begin[] = {0, 1};
    const uint8_t wanted = 1;
    return decode({sizeof(kvg_batch), 1, &id, &pos, seq_begin, &seq_id, &wanted, nullptr, nullptr, 0, 0, 0}, output);
}

} // namespace kvg
