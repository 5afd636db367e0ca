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
    streams_.push_back({set, first, last, states::NO_ROW, states::NO_ROW});
    each_member(set.data(), set.size(), [&](uint32_t seq) { of_seq_[seq] = made; });
    return made;
}

uint32_t state_step::from_row(const stream & s) const {
    if (s.at != states::NO_ROW) {
        return s.at;
    }
    return s.before == NO_STREAM ? states_.row_of(s.seq) : streams_[s.before].to;
}

const std::vector<recur_run> & state_step::runs(uint32_t begin, uint32_t n) {
    runs_.clear();
    rows_.clear();
    tokens_.clear();
    after_.clear();
    if (!states_.any()) {
        return runs_;
    }
    const state_rows & memory = states_.rows();
    std::vector<uint32_t> run_of(streams_.size(), NO_RUN);
    for (uint32_t i = 0; i < n; ++i) {
        uint32_t & run = run_of[of_token_[begin + i]];
        if (run == NO_RUN) {
            stream & s = streams_[of_token_[begin + i]];
            run = static_cast<uint32_t>(runs_.size());
            const uint32_t from = from_row(s);
            const uint32_t before = s.at != states::NO_ROW || s.before == NO_STREAM ? NO_RUN : run_of[s.before];
            runs_.push_back(
                {from == states::NO_ROW ? nullptr : memory.on_host(from), memory.on_host(s.to), nullptr, 0, nullptr});
            rows_.push_back({from, s.to, before, {}});
            tokens_.emplace_back();
            after_.emplace_back();
        }
        const uint32_t row = mark_rows_[begin + i];
        const bool goes_on = row != states::NO_ROW && row != streams_[of_token_[begin + i]].to;
        tokens_[run].push_back(i);
        rows_[run].after.push_back(goes_on ? row : states::NO_ROW);
        after_[run].push_back(goes_on ? memory.on_host(row) : nullptr);
        streams_[of_token_[begin + i]].at = goes_on ? row : rows_[run].to;
    }
    for (size_t r = 0; r < runs_.size(); ++r) {
        runs_[r].tokens = tokens_[r].data();
        runs_[r].after = after_[r].data();
        runs_[r].n = static_cast<uint32_t>(tokens_[r].size());
    }
    return runs_;
}

namespace {

// Tokens of one run up to one whose state is wanted.
struct segment {
    uint32_t level; // it needs what segments of lower levels write
    uint32_t from;
    uint32_t to;
    std::vector<uint32_t> tokens;

    bool goes_with(const segment & o) const { return level == o.level && tokens.size() == o.tokens.size(); }
    bool operator<(const segment & o) const { return level != o.level ? level < o.level : tokens.size() > o.tokens.size(); }
};

} // namespace

state_segments state_step::segments() const {
    std::vector<segment> all;
    std::vector<uint32_t> last_level(rows_.size());
    for (size_t r = 0; r < rows_.size(); ++r) {
        uint32_t level = rows_[r].before == NO_RUN ? 0 : last_level[rows_[r].before] + 1;
        uint32_t from = rows_[r].from;
        for (size_t t = 0; t < tokens_[r].size(); ++t) {
            if (t == 0 || rows_[r].after[t - 1] != states::NO_ROW) {
                all.push_back({level, from, rows_[r].to, {}});
                last_level[r] = level++;
            }
            all.back().tokens.push_back(tokens_[r][t]);
            if (rows_[r].after[t] != states::NO_ROW) {
                all.back().to = from = rows_[r].after[t];
            }
        }
    }
    std::stable_sort(all.begin(), all.end());
    state_segments out;
    for (size_t i = 0; i < all.size(); ++i) {
        if (i == 0 || !all[i].goes_with(all[i - 1])) {
            out.groups.push_back({0, static_cast<uint32_t>(all[i].tokens.size())});
        }
        ++out.groups.back().n_seqs;
        out.from.push_back(static_cast<int32_t>(all[i].from == states::NO_ROW ? states_.n_rows() : all[i].from));
        out.to.push_back(all[i].to);
        out.order.insert(out.order.end(), all[i].tokens.begin(), all[i].tokens.end());
    }
    return out;
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
