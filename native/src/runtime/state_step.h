// Which states a batch's tokens go through. Nothing of it is seen by anybody until commit(); before that, or without it, all is as it was.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/recur.h"
#include "graph/state_segments.h"
#include "memory/kv_cache.h"
#include "runtime/batch.h"

namespace kvg {

class state_step {
public:
    // precondition: sequences that share a token have the same state
    state_step(kv_cache & cache, const batch & batch);
    ~state_step();
    state_step(const state_step &) = delete;
    state_step & operator=(const state_step &) = delete;

    // Takes the rows that it needs. Checkpoints that are in the way are dropped. Call it once, before runs().
    void take();
    // Of tokens [begin, begin + n), in an order in which each run finds what it begins with. Valid until the next call.
    const std::vector<recur_run> & runs(uint32_t begin, uint32_t n);
    // The same tokens, for states on devices. precondition: runs() of these
    state_segments segments() const;
    // The row with the state after a token whose sequences get a checkpoint; NO_ROW where layers have no state.
    uint32_t row_after(uint32_t token) const { return states_.any() ? mark_rows_[token] : states::NO_ROW; }
    // The sequences have the new states.
    void commit();

private:
    static constexpr uint32_t NO_STREAM = UINT32_MAX;

    // Tokens of the same sequences, which follow each other.
    struct stream {
        seq_set set;
        uint32_t seq;    // one of them
        uint32_t before; // the stream that it goes on from, NO_STREAM: the state that the sequences had
        uint32_t to;     // a row, for what it ends with
        uint32_t at;     // the row that has the state after its tokens so far; NO_ROW before the first
    };
    uint32_t stream_of(uint32_t token);
    uint32_t from_row(const stream & s) const;

    kv_cache & cache_;
    states & states_;
    const batch & batch_;
    std::vector<stream> streams_;
    std::vector<uint32_t> of_seq_;    // the last stream of each sequence
    std::vector<uint32_t> of_token_;  // the stream of each token
    std::vector<uint32_t> marks_;     // tokens behind which a stream goes on, and whose state is a checkpoint's
    std::vector<uint32_t> mark_rows_; // of each token; NO_ROW: none
    // Rows of a run.
    struct run_rows {
        uint32_t from; // NO_ROW: zeros
        uint32_t to;
        uint32_t before;             // the run of the same tokens that it goes on from; NO_RUN: none of these
        std::vector<uint32_t> after; // each token; NO_ROW: its state is not wanted, or the last one
    };
    static constexpr uint32_t NO_RUN = UINT32_MAX;
    std::vector<recur_run> runs_;
    std::vector<run_rows> rows_;                // of each run
    std::vector<std::vector<uint32_t>> tokens_; // so too
    std::vector<std::vector<float *>> after_;   // so too
};

} // namespace kvg
