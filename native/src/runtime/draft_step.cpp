#include "runtime/draft_step.h"

#include <algorithm>

#include "error.h"
#include "runtime/bounded.h"

namespace kvg {

namespace {

// Cells of drafts are given to others: no device may still write into them.
struct at_rest {
    const backends & of;
    ~at_rest() { of.wait(); }
};

} // namespace

draft_step::drafted_batch::drafted_batch(const std::vector<drafted_text> & texts, const kv_cache & cache, bool has_cells)
    : seq_begin(1, 0) {
    const auto longest = std::max_element(texts.begin(), texts.end(), [](const auto & a, const auto & b) { return a.n < b.n; });
    for (uint32_t k = 0; k < longest->n; ++k) {
        begins.push_back(static_cast<uint32_t>(token.size()));
        for (const drafted_text & text : texts) {
            if (text.n > k) {
                token.push_back(text.token); // of later steps not yet known, and any will do
                pos.push_back(static_cast<int32_t>(cache.next_pos(text.seq) + (has_cells ? k : 0)));
                seq.push_back(text.seq);
                seq_begin.push_back(static_cast<int32_t>(seq.size()));
                logits.push_back(1);
            }
        }
    }
    begins.push_back(static_cast<uint32_t>(token.size()));
}

kvg_batch draft_step::drafted_batch::view(size_t begin, size_t end) const {
    kvg_batch view = {};
    view.struct_size = sizeof(view);
    view.n_tokens = int64_t{begins[end]} - begins[begin];
    view.token = token.data() + begins[begin];
    view.pos = pos.data() + begins[begin];
    view.seq_begin = seq_begin.data(); // each token has one sequence
    view.seq_id = seq.data() + begins[begin];
    view.logits = logits.data() + begins[begin];
    return view;
}

// Texts without a known state are left out.
std::vector<drafted_text> draft_step::read(const kvg_draft_request & in) const {
    const int64_t n = bounded("n", in.n, 1, cache_.n_seq_max());
    if (!in.seq || !in.token || !in.n_tokens || !in.drafted) {
        fail(KVG_INVALID_ARGUMENT, "a request for drafts with a NULL array");
    }
    bounded("most", in.most, 1, params_.n_batch);
    std::vector<drafted_text> texts;
    std::vector<bool> has(cache_.n_seq_max(), false);
    for (int64_t i = 0; i < n; ++i) {
        const auto seq = static_cast<uint32_t>(bounded("seq", in.seq[i], 0, int64_t{cache_.n_seq_max()} - 1));
        const auto token = static_cast<int32_t>(bounded("token", in.token[i], 0, int64_t{model_.hparams().n_vocab} - 1));
        const auto n_tokens = static_cast<uint32_t>(bounded("n_tokens", in.n_tokens[i], 0, in.most));
        if (has[seq]) {
            fail(KVG_INVALID_ARGUMENT, "sequence %u is asked for two drafts", seq);
        }
        has[seq] = true;
        if (n_tokens > 0 && last_.before(seq, static_cast<int32_t>(cache_.next_pos(seq)))) {
            texts.push_back({static_cast<size_t>(i), static_cast<int32_t>(seq), token, n_tokens});
        }
    }
    return texts;
}

void draft_step::begin_states(const std::vector<drafted_text> & texts) {
    const size_t n_embd = model_.hparams().n_embd;
    states_.resize(texts.size() * n_embd);
    logits_.resize(texts.size() * model_.hparams().n_vocab);
    for (size_t i = 0; i < texts.size(); ++i) {
        const auto seq = static_cast<uint32_t>(texts[i].seq);
        std::copy_n(last_.before(seq, static_cast<int32_t>(cache_.next_pos(seq))), n_embd,
                    states_.begin() + static_cast<std::ptrdiff_t>(i * n_embd));
    }
}

// Sets states_ to those behind the tokens, and logits_.
void draft_step::compute(const batch & batch, const micro_batch & ubatch, const reservation * reserved) {
    std::vector<cell_span> spans;
    for (const kv_group & group : cache_.groups()) {
        spans.push_back(attended_span(group.cells(), batch, ubatch, params_.align));
    }
    decode_graph & graph = decoder_.prepare(ubatch.n, ubatch.n_outputs, spans, {}, true);
    inputs_.set(graph, cache_, batch, ubatch, reserved, spans, {}, decoder_.attended());
    ggml_backend_tensor_set(graph.hidden, states_.data(), 0, ggml_nbytes(graph.hidden));
    if (carrier * carrier = decoder_.carrier()) {
        carrier->expect(spans, reserved->slots_of(ubatch.begin, ubatch.n)); // there is no carrier beside an assistant
    }
    for (const std::shared_ptr<tap> & each : decoder_.taps().all()) {
        each->expect({}, {});
    }
    if (decoder_.can_observe()) {
        decoder_.observe(ubatch.n, ubatch.n, false); // none of them
    }
    run_.compute(graph, ubatch.n);
    decoder_.wait();
    ggml_backend_tensor_get(graph.embd, states_.data(), 0, ggml_nbytes(graph.embd));
    ggml_backend_tensor_get(graph.logits, logits_.data(), 0, ggml_nbytes(graph.logits));
}

// Writes what step k has drafted. Returns the texts that want more: their states, and their tokens of step k + 1, are set.
std::vector<drafted_text> draft_step::take(uint32_t k, drafted_batch & tokens, const std::vector<drafted_text> & texts,
                                           const kvg_draft_request & in, const kvg_output * output) {
    const size_t n_embd = model_.hparams().n_embd;
    const size_t n_vocab = model_.hparams().n_vocab;
    const size_t begin = tokens.begins[k];
    if (output && output->logits) {
        std::copy_n(logits_.begin(), texts.size() * n_vocab, output->logits + begin * n_vocab);
    }
    if (output && output->embd) {
        std::copy_n(states_.begin(), texts.size() * n_embd, output->embd + begin * n_embd);
    }
    std::vector<drafted_text> left;
    for (size_t i = 0; i < texts.size(); ++i) {
        const float * row = logits_.data() + i * n_vocab;
        const auto best = static_cast<int32_t>(std::max_element(row, row + n_vocab) - row);
        in.drafted[texts[i].at * static_cast<size_t>(in.most) + k] = best;
        if (texts[i].n > k + 1) {
            std::copy_n(states_.begin() + static_cast<std::ptrdiff_t>(i * n_embd), n_embd,
                        states_.begin() + static_cast<std::ptrdiff_t>(left.size() * n_embd));
            tokens.token[tokens.begins[k + 1] + left.size()] = best;
            left.push_back(texts[i]);
        }
    }
    return left;
}

void draft_step::by_head(drafted_batch & tokens, std::vector<drafted_text> texts, const kvg_draft_request & in,
                         const kvg_output * output) {
    const kvg_batch view = tokens.view(0, tokens.n_steps());
    const batch batch(view, model_.hparams(), params_.n_batch, cache_);
    cache_.require_cells(std::vector<uint32_t>(cache_.groups().size(), batch.n_tokens()), "the drafts");
    upkeep_.before_decode(batch.n_tokens());
    upkeep_.tell_waiting(decoder_);
    begin_states(texts);
    reservation reserved(cache_, batch); // never committed
    const at_rest rest = {backends_};
    for (uint32_t k = 0; k < tokens.n_steps(); ++k) {
        const auto n = static_cast<uint32_t>(texts.size());
        reserved.put(tokens.begins[k], n);
        compute(batch, {tokens.begins[k], n, n}, &reserved);
        texts = take(k, tokens, texts, in, output);
    }
}

// Tokens of an assistant attend to the text's cells alone, and have none.
void draft_step::by_assistant(drafted_batch & tokens, std::vector<drafted_text> texts, const kvg_draft_request & in,
                              const kvg_output * output) {
    upkeep_.before_decode(0);
    upkeep_.tell_waiting(decoder_);
    begin_states(texts);
    for (uint32_t k = 0; k < tokens.n_steps(); ++k) {
        const auto n = static_cast<uint32_t>(texts.size());
        const kvg_batch view = tokens.view(k, k + 1);
        compute(batch(view, model_.hparams(), params_.n_batch, cache_), {0, n, n}, nullptr);
        texts = take(k, tokens, texts, in, output);
    }
}

int64_t draft_step::draft(const kvg_draft_request & in, const kvg_output * output) {
    upkeep_.require_intact();
    const std::vector<drafted_text> asked = read(in);
    std::fill_n(in.drafted, in.n * in.most, -1);
    std::vector<drafted_text> texts(asked.begin(), asked.begin() + std::min<std::ptrdiff_t>(asked.size(), params_.n_ubatch));
    if (texts.empty()) {
        return 0;
    }
    const bool has_cells = !model_.assistant();
    drafted_batch tokens(texts, cache_, has_cells);
    if (output && output->n_rows < tokens.n_tokens()) {
        fail(KVG_INVALID_ARGUMENT, "%u tokens are drafted and the buffers have room for %lld", tokens.n_tokens(),
             static_cast<long long>(output->n_rows));
    }
    if (has_cells) {
        by_head(tokens, std::move(texts), in, output);
    } else {
        by_assistant(tokens, std::move(texts), in, output);
    }
    return tokens.n_tokens();
}

} // namespace kvg
