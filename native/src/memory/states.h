// Recurrent states of sequences. A row is the states of all layers of one sequence at one place of its text. Rows are never
// overwritten while anybody has them: a step writes to a free row, which its sequence then has, so a step can be undone, and a row can be
// kept as a checkpoint without a copy. Sequences share a row until one of them goes on.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory/state_rows.h"

namespace kvg {

class states {
public:
    static constexpr uint32_t NO_ROW = UINT32_MAX;

    // layers, homes: as state_rows takes them. n_kept: rows for checkpoints and resume points, beside two for each sequence
    states(const std::vector<layer_spec> & layers, const std::vector<ggml_backend_dev_t> & homes, uint32_t n_seq_max,
           uint32_t n_kept);
    // error(KVG_DEVICE)
    void allocate() { rows_.allocate(); }

    bool any() const { return rows_.floats() > 0; }
    state_rows & rows() { return rows_; }
    const state_rows & rows() const { return rows_; }
    uint32_t n_rows() const { return static_cast<uint32_t>(users_.size()); }
    // by sequences and under ids, or taken; without what only undo() would bring back
    uint32_t n_used() const;
    uint64_t row_bytes() const { return rows_.floats() * sizeof(float); }

    // without the rows that undo() would bring back
    uint32_t n_free() const { return n_rows() - n_used_; }
    // Rows that would be free if these holds were released, a sequence (below 0: every one) had no row, and undo() brought none back.
    // cells::NOBODY: each sequence keeps its row
    uint32_t n_free_without(const std::vector<int64_t> & holds, int64_t seq) const;
    uint32_t n_kept() const { return n_kept_; }

    // The row of a sequence; NO_ROW before its first token, and where nobody knows the state at its end.
    uint32_t row_of(uint32_t seq) const { return of_seq_[seq]; }
    // The sequence gets a row in place of its own, as one more user of it. NO_ROW: none
    void set(uint32_t seq, uint32_t row);
    // A free row, used by the caller. precondition: there is one
    uint32_t take();
    // One user less.
    void drop(uint32_t row);

    // The state of the sequence is kept under an id. precondition: it has one, and the id is new
    void hold(int64_t id, uint32_t seq) { hold_row(id, of_seq_[seq]); }
    void hold_row(int64_t id, uint32_t row);
    // So that hold_row() can't fail for these ids. Until then they have no row.
    void reserve_holds(const std::vector<int64_t> & ids);
    // Without hold_row(): they are unknown again.
    void cancel_holds(const std::vector<int64_t> & ids) noexcept;
    bool has_hold(int64_t id) const {
        const auto found = held_.find(id);
        return found != held_.end() && found->second != NO_ROW;
    }
    uint32_t held(int64_t id) const { return held_.at(id); }
    // The sequence gets the state that is kept.
    void restore(int64_t id, uint32_t seq) { set(seq, held_.at(id)); }
    void release(int64_t id);
    // Nobody has any state, and rows that were ever written are zeros.
    void clear();

    // What a step replaced, so that it can be undone: until the next step.
    void remember(const std::vector<std::pair<uint32_t, uint32_t>> & replaced);
    // The sequences have again what was replaced.
    void undo();
    void forget();

private:
    void share(uint32_t row) { ++users_[row]; }

    state_rows rows_;
    uint32_t n_kept_;
    std::vector<uint32_t> users_; // of each row
    uint32_t n_used_ = 0;
    uint32_t n_taken_ = 0; // no row from here on was ever taken
    std::vector<uint32_t> of_seq_;
    std::unordered_map<int64_t, uint32_t> held_;
    std::vector<std::pair<uint32_t, uint32_t>> replaced_; // sequence and row
};

} // namespace kvg
