#include "runtime/state_step.h"

#include <algorithm>

#include "error.h"
#include "fault.h"

namespace kvg {

state_step::state_step(kv_cache & cache, const batch & batch)
    : cache_(cache), states_(cache.states()), batch_(batch), of_seq_(batch.set(0).size() * 64, NO_STREAM) {
    if (!states_.any()) {
        return;
    }
    of_token_.reserve(batch.n_tokens());
    for (uint32_t i = 0; i < batch.n_tokens(); ++i) {
        of_token_.push_back(stream_of(i));
    }
    std::vector<uint32_t> last(streams_.size()); // token
    for (uint32_t i = 0; i < batch.n_tokens(); ++i) {
        last[of_token_[i]] = i;
    }
    mark_rows_.assign(batch.n_tokens(), states::NO_ROW);
    for (uint32_t i = 0; i < batch.n_tokens(); ++i) {
        if (batch.is_checkpoint(i) && last[of_token_[i]] != i) {
            marks_.push_back(i);
        }
    }
}

void state_step::take() {
    if (!states_.any()) {
        return;
    }
    states_.forget();
    const auto n = static_cast<uint32_t>(streams_.size() + marks_.size());
    if (!cache_.require_states(n)) {
        fail(KVG_CACHE_FULL,
             "the batch's checkpoints need %zu states more than the batch, and there is room for %zu; ask for fewer "
             "at a time, release resume points, or use a larger checkpoint_bytes",
             marks_.size(), states_.n_free() - std::min<size_t>(states_.n_free(), streams_.size()));
    }
    for (stream & each : streams_) {
        each.to = states_.take();
        fault_point("state-take");
    }
    for (const uint32_t token : marks_) {
        mark_rows_[token] = states_.take();
        fault_point("state-take");
    }
    for (uint32_t i = 0; i < batch_.n_tokens(); ++i) {
        if (batch_.is_checkpoint(i) && mark_rows_[i] == states::NO_ROW) {
            mark_rows_[i] = streams_[of_token_[i]].to; // its stream ends there
        }
    }
}

state_step::~state_step() {
    for (const stream & each : streams_) {
        if (each.to != states::NO_ROW) {
            states_.drop(each.to);
        }
    }
    for (const uint32_t token : marks_) {
        if (mark_rows_[token] != states::NO_ROW) {
            states_.drop(mark_rows_[token]);
        }
    }
}

// Sequences that part within the batch go on from the state that they had together.
uint32_t state_step::stream_of(uint32_t token) {
    const seq_set & set = batch_.set(token);
    uint32_t first = NO_STREAM; // sequence
    each_member(set.data(), set.size(), [&](uint32_t seq) { first = first == NO_STREAM ? seq : first; });
    const uint32_t last = of_seq_[first];
    if (last != NO_STREAM && streams_[last].set == set) {
        return last;
    }
    const auto made = static_cast<uint32_t>(streams_.size());
    streams_.push_back({set, first, last, states::NO_ROW, false});
    each_member(set.data(), set.size(), [&](uint32_t seq) { of_seq_[seq] = made; });
    return made;
}

uint32_t state_step::from_row(const stream & s) const {
    if (s.begun) {
        return s.to;
    }
    return s.before == NO_STREAM ? states_.row_of(s.seq) : streams_[s.before].to;
}

const std::vector<recur_run> & state_step::runs(uint32_t begin, uint32_t n) {
    runs_.clear();
    tokens_.clear();
    after_.clear();
    if (!states_.any()) {
        return runs_;
    }
    std::vector<uint32_t> run_of(streams_.size(), NO_STREAM);
    for (uint32_t i = 0; i < n; ++i) {
        uint32_t & run = run_of[of_token_[begin + i]];
        if (run == NO_STREAM) {
            stream & s = streams_[of_token_[begin + i]];
            run = static_cast<uint32_t>(runs_.size());
            const uint32_t from = from_row(s);
            runs_.push_back({from == states::NO_ROW ? nullptr : states_.data(from), states_.data(s.to), nullptr, 0, nullptr});
            tokens_.emplace_back();
            after_.emplace_back();
            s.begun = true;
        }
        const uint32_t row = mark_rows_[begin + i];
        const bool goes_on = row != states::NO_ROW && row != streams_[of_token_[begin + i]].to;
        tokens_[run].push_back(i);
        after_[run].push_back(goes_on ? states_.data(row) : nullptr);
    }
    for (size_t r = 0; r < runs_.size(); ++r) {
        runs_[r].tokens = tokens_[r].data();
        runs_[r].after = after_[r].data();
        runs_[r].n = static_cast<uint32_t>(tokens_[r].size());
    }
    return runs_;
}

void state_step::commit() {
    std::vector<std::pair<uint32_t, uint32_t>> replaced;
    for (uint32_t seq = 0; states_.any() && seq < of_seq_.size(); ++seq) {
        if (of_seq_[seq] != NO_STREAM) {
            replaced.emplace_back(seq, states_.row_of(seq));
        }
    }
    fault_point("state-keep");
    states_.remember(replaced);
    for (const auto & [seq, row] : replaced) {
        states_.set(seq, streams_[of_seq_[seq]].to);
    }
}

} // namespace kvg
