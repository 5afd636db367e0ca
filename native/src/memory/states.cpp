#include "memory/states.h"

#include <algorithm>
#include <map>

#include "error.h"

namespace kvg {

states::states(const std::vector<layer_spec> & layers, const std::vector<ggml_backend_dev_t> & homes, uint32_t n_seq_max,
               uint32_t n_kept)
    : rows_(layers, homes, 2 * n_seq_max + n_kept), n_kept_(n_kept), users_(any() ? rows_.n_rows() : 0),
      of_seq_(n_seq_max, NO_ROW) {}

uint32_t states::n_used() const {
    std::map<uint32_t, uint32_t> for_undo; // rows, and how many of their users are there to undo a step
    for (const auto & [seq, row] : replaced_) {
        for_undo[row] += row != NO_ROW;
    }
    return n_used_ - static_cast<uint32_t>(std::count_if(for_undo.begin(), for_undo.end(), [&](const auto & each) {
               return each.second > 0 && each.second == users_[each.first];
           }));
}

uint32_t states::n_free_without(const std::vector<int64_t> & holds, int64_t seq) const {
    std::vector<uint32_t> left = users_;
    const auto let_go = [&](uint32_t row) {
        if (row != NO_ROW) {
            --left[row];
        }
    };
    for (const auto & [replaced_seq, row] : replaced_) {
        let_go(row);
    }
    for (const int64_t id : holds) {
        let_go(has_hold(id) ? held(id) : NO_ROW);
    }
    for (uint32_t s = 0; s < of_seq_.size(); ++s) {
        let_go(seq < 0 || seq == s ? of_seq_[s] : NO_ROW);
    }
    return static_cast<uint32_t>(std::count(left.begin(), left.end(), 0));
}

uint32_t states::take() {
    const auto free = std::find(users_.begin(), users_.end(), 0);
    if (free == users_.end()) {
        fail(KVG_INTERNAL, "no row is free for a recurrent state");
    }
    *free = 1;
    ++n_used_;
    const auto row = static_cast<uint32_t>(free - users_.begin());
    n_taken_ = std::max(n_taken_, row + 1);
    return row;
}

void states::drop(uint32_t row) { n_used_ -= --users_[row] == 0; }

void states::set(uint32_t seq, uint32_t row) {
    if (row != NO_ROW) {
        share(row);
    }
    if (of_seq_[seq] != NO_ROW) {
        drop(of_seq_[seq]);
    }
    of_seq_[seq] = row;
}

void states::hold_row(int64_t id, uint32_t row) {
    held_[id] = row;
    share(row);
}

void states::reserve_holds(const std::vector<int64_t> & ids) {
    for (const int64_t id : ids) {
        held_.emplace(id, NO_ROW);
    }
}

void states::cancel_holds(const std::vector<int64_t> & ids) noexcept {
    for (const int64_t id : ids) {
        if (const auto found = held_.find(id); found != held_.end() && found->second == NO_ROW) {
            held_.erase(found);
        }
    }
}

void states::release(int64_t id) {
    drop(held_.at(id));
    held_.erase(id);
}

void states::clear() {
    std::fill(users_.begin(), users_.end(), 0);
    std::fill(of_seq_.begin(), of_seq_.end(), NO_ROW);
    held_.clear();
    replaced_.clear();
    n_used_ = 0;
    rows_.clear(n_taken_);
    n_taken_ = 0;
}

void states::remember(const std::vector<std::pair<uint32_t, uint32_t>> & replaced) {
    replaced_ = replaced;
    for (const auto & [seq, row] : replaced_) {
        if (row != NO_ROW) {
            share(row);
        }
    }
}

void states::undo() {
    for (const auto & [seq, row] : replaced_) {
        set(seq, row);
    }
    forget();
}

void states::forget() {
    for (const auto & [seq, row] : replaced_) {
        if (row != NO_ROW) {
            drop(row);
        }
    }
    replaced_.clear();
}

} // namespace kvg
