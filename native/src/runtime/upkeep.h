// Does what is pending, in the right order: defrag and K-shift of every group. Also copies shared cells when a sequence's positions change.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "backends.h"
#include "graph/decoder.h"
#include "kvgraph.h"
#include "memory/kv_cache.h"
#include "model/weights.h"
#include "shift/by_query.h"
#include "shift/k_shift.h"

namespace kvg {

class upkeep {
public:
    // can_wait: whether attention can rotate queries for cells whose K-shift is pending. n_threads: of the CPU. The other arguments must
    // outlive this object.
    upkeep(const model & model, kv_cache & cache, const backends & backends, bool can_wait, int n_threads,
           float defrag_threshold);

    // error(KVG_DEVICE) when the cache is broken()
    void require_intact() const;
    void request_defrag(int32_t policy);
    void clear(bool data);

    // As in `cells`, but these two first copy shared cells, in every group, so that the sequence has cells of its own. Operations that
    // need no copies call the cache directly. error(KVG_CACHE_FULL), with nothing changed, when there is no room for the copies
    void seq_add(int64_t seq, int64_t p0, int64_t p1, int64_t delta);
    void seq_div(int64_t seq, int64_t p0, int64_t p1, int64_t d);

    // Defrag, then K-shift, as far as each is pending. Cells for which attention rotates queries wait, and K of the others is rotated.
    kvg_update_stats update();
    // The same, before a decode of so many tokens. Also runs defrag when the share of holes is above the threshold, and lets rows age until
    // there is room for the tokens. precondition: that many cells are empty, or may be reused
    void before_decode(uint32_t n_tokens);
    // K-shift only: cells are not moved.
    void before_read();
    // The same, and after it none of these cells of a group waits, and K of all of them carries one dither, which is returned.
    uint8_t settle_alike(size_t group, const std::vector<uint32_t> & cells);
    // what before_decode() and before_read() did since the last call of take_stats()
    kvg_update_stats take_stats();

    // group: its index in the cache. Whether no position has changed since the last update: all cells that are pending wait.
    bool is_settled(size_t group) const;
    const k_shift & shift(size_t group) const { return groups_[group].shift; }
    // How a layer's queries are rotated for the cells that wait. Valid until the next update.
    attend_rotations waiting(uint32_t layer);
    // Of all layers, to the decoder, before it prepares a graph.
    void tell_waiting(decoder & decoder);
    // Whether a device rotates K of all its cells itself; true for a device without cells.
    bool can_shift_on(ggml_backend_dev_t device) const;

private:
    static constexpr int32_t NO_DEFRAG = -1;

    static constexpr uint64_t NOT_SETTLED = UINT64_MAX;

    struct group_state {
        group_state(kv_group & group, const model & model)
            : layers(rotations_of(group, model.hparams().layers, model.rope_factors(group.cells().size()))),
              shift(group, layers) {}

        std::vector<layer_rotation> layers;
        k_shift shift;
        std::optional<query_rotations> waiting; // for the cells that wait
        uint64_t settled = 0;                   // cells::shift_version() when the cells were settled last
    };

    // error(KVG_UNSUPPORTED) when no rotation gives K another position
    void require_movable(const char * op) const;
    void reposition(const std::vector<kvg::reposition> & changes, const char * op);
    void settle_all(kvg_update_stats & stats);
    void compact_all(const std::vector<int32_t> & policies, kvg_update_stats & stats);
    bool is_pending(const std::vector<int32_t> & policies) const;
    void make_plain(size_t group, const std::vector<cell_move> & moves);
    void age_all(uint32_t n, kvg_update_stats & stats);
    void flush(const std::vector<int32_t> & policies, uint32_t n_tokens, kvg_update_stats & stats);

    kv_cache & cache_;
    const backends & backends_;
    bool learned_positions_;
    bool can_wait_;
    int n_threads_;
    float defrag_threshold_;
    int32_t defrag_pending_ = NO_DEFRAG; // or a kvg_defrag_policy
    std::deque<group_state> groups_;     // in the cache's order
    kvg_update_stats flushed_ = {};
};

} // namespace kvg
