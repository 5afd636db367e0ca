#include "runtime/loaded_states.h"

#include <algorithm>
#include <set>
#include <utility>

#include "error.h"
#include "fault.h"
#include "runtime/bounded.h"

namespace kvg {

loaded_states::loaded_states(kv_cache & cache, int64_t seq, const kvg_kv_state_list & in,
                             const kvg_kv_checkpoint_list & checkpoints, const std::vector<int64_t> & holds)
    : states_(cache.states()), seq_(seq), in_(in), checkpoints_(checkpoints), holds_(holds) {
    check(cache.n_seq_max());
}

void loaded_states::reserve(const std::vector<int64_t> & gone) {
    if (!states_.any()) {
        return;
    }
    if (const uint32_t n_free = states_.n_free_without(gone, seq_); n_rows() > n_free) {
        fail(KVG_CACHE_FULL,
             "what is loaded has %u recurrent states and there is room for %u; use a larger checkpoint_bytes or n_seq_max",
             n_rows(), n_free);
    }
    rows_.reserve(n_rows());
    states_.reserve_holds(holds_);
    fault_point("load-state");
}

loaded_states::~loaded_states() { states_.cancel_holds(holds_); }

void loaded_states::commit() {
    states_.forget();
    for (size_t row = 0; row < n_rows(); ++row) {
        rows_.push_back(states_.take());
        states_.rows().write(rows_[row], in_.data + row * states_.rows().floats());
    }
    for (int64_t i = 0; i < in_.n; ++i) {
        const uint32_t row = rows_[static_cast<size_t>(in_.row[i])];
        if (in_.p[i] < 0) {
            states_.set(static_cast<uint32_t>(in_.seq[i]), row);
            continue;
        }
        for (size_t c = 0; c < holds_.size(); ++c) {
            if (checkpoints_.seq[c] == in_.seq[i] && checkpoints_.p[c] == in_.p[i]) {
                states_.hold_row(holds_[c], row);
            }
        }
    }
    for (const uint32_t row : rows_) { // those who have it are its users now
        states_.drop(row);
    }
}

void loaded_states::check(uint32_t n_seq_max) const {
    bounded("n", in_.n, 0, states_.any() ? int64_t{1} << 30 : 0);
    bounded("n_rows", in_.n_rows, 0, states_.any() ? int64_t{1} << 30 : 0);
    std::set<std::pair<int32_t, int32_t>> known;
    for (int64_t i = 0; i < in_.n; ++i) {
        bounded("a state's sequence", in_.seq[i], std::max<int64_t>(seq_, 0), seq_ < 0 ? int64_t{n_seq_max} - 1 : seq_);
        bounded("a state's row", in_.row[i], 0, in_.n_rows - 1);
        if (!known.insert({in_.seq[i], in_.p[i]}).second) {
            fail(KVG_INVALID_ARGUMENT, "sequence %d has two states at position %d", in_.seq[i], in_.p[i]);
        }
    }
    for (int64_t c = 0; states_.any() && c < checkpoints_.n; ++c) {
        if (known.count({checkpoints_.seq[c], checkpoints_.p[c]}) == 0) {
            fail(KVG_INVALID_ARGUMENT, "the checkpoint of sequence %d at position %d has no recurrent state",
                 checkpoints_.seq[c], checkpoints_.p[c]);
        }
    }
}

} // namespace kvg
