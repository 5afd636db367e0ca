// Token batches: checked once, then trusted.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kvgraph.h"
#include "memory/kv_cache.h"

namespace kvg {

class batch {
public:
    // Checks every value against the model and the cache (hidden states are taken as they are): token ids, sequence ids and positions that there are, positions
    // that rise within each sequence, and several sequences for a token only where they see the same cells before it.
    // error(KVG_INVALID_ARGUMENT), naming the token. error(KVG_UNSUPPORTED) for a repair of what can't be repaired
    batch(const kvg_batch & in, const hparams & h, uint32_t n_batch, const kv_cache & cache);

    uint32_t n_tokens() const { return static_cast<uint32_t>(sets_.size()); }
    uint32_t n_outputs() const { return n_outputs_; }
    const int32_t * tokens() const { return in_.token; }
    // (n_tokens, n_embd); nullptr where there are tokens
    const float * hidden() const { return in_.hidden; }
    const int32_t * positions() const { return in_.pos; }
    const seq_set & set(uint32_t i) const { return sets_[i]; }
    // in a stage with another one behind it all tokens are
    bool is_output(uint32_t i) const { return all_outputs_ || in_.logits[i] != 0; }
    // whether the token's sequences get a checkpoint behind it
    bool is_checkpoint(uint32_t i) const { return in_.checkpoint && in_.checkpoint[i] != 0; }
    // the first of those that are observed; n_tokens(): none
    uint32_t observed_from() const { return n_tokens() - static_cast<uint32_t>(in_.n_observed); }
    // whether of these only the highest is wanted that any gives a cell
    bool observes_peaks() const { return in_.peaks != 0; }
    // of each sequence that the batch has, where its tokens begin
    std::vector<first_position> first_positions() const;
    // Whether any token lies below the end of a sequence of its.
    bool repairs() const { return !places_.empty(); }
    // Whether the position lies below the end that the sequence had. precondition: it repairs
    bool is_below(uint32_t seq, int32_t pos) const { return pos < ends_[seq]; }
    // Whether the batch has a token of the sequence at this position. precondition: it repairs
    bool has_place(uint32_t seq, int32_t pos) const {
        return std::binary_search(places_[seq].begin(), places_[seq].end(), pos);
    }

private:
    void check_front(const hparams & h) const;
    void read_sets(uint32_t n_seq_max);
    void check_positions(const kv_cache & cache, bool encodes);
    void check_first(const kv_cache & cache, uint32_t seq, uint32_t i);
    void read_places(const kv_cache & cache);
    bool see_same(const cells & cells, uint32_t i) const;
    void check_shared(const kv_cache & cache, bool encodes) const;

    const kvg_batch & in_; // outlives this object: one decode call
    std::vector<seq_set> sets_;
    uint32_t n_outputs_ = 0;
    bool all_outputs_;
    bool is_below_ = false;                    // whether any token lies below the end of a sequence of its
    std::vector<int64_t> ends_;                // of each sequence; empty unless it repairs
    std::vector<std::vector<int32_t>> places_; // of each sequence, rising: the positions of its tokens; empty unless it repairs
};

} // namespace kvg
