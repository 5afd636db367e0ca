// Cells whose content comes from outside, piece by piece. They are reserved first, then written, then shown to a sequence.
//
// Reserving and showing change the cells, so they are calls on the context. Writing changes only the rows of the reserved cells, which
// nothing else uses. So any thread may write while the context decodes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kvgraph.h"
#include "memory/kv_cache.h"

namespace kvg {

class incoming {
public:
    // groups: positions and dithers for each group of the cache. error(KVG_CACHE_FULL), with nothing reserved in any group
    incoming(kv_cache & cache, const kvg_kv_place * groups, int64_t n_groups);

    // Writes rows, from any thread. The fields are described at kvg_incoming_rows. error(KVG_INVALID_ARGUMENT) when the reservation is
    // over
    void write(const kvg_incoming_rows & in);

    // show(), give_back() and forget() are calls on the context.
    // The sequence sees the cells. error(KVG_INVALID_ARGUMENT), with nothing changed, unless all rows were written and the sequence ends
    // before the first position. state: of its end; nullptr: not known. error(KVG_CACHE_FULL) when there is no room for the state
    void show(int64_t seq, const float * state) { show(seq, false, state); }
    // The same for a text that begins at position 0, where windows have lost what comes before their rows: these may begin before the
    // sequence's end.
    void show_text(int64_t seq, const float * state) { show(seq, true, state); }
    // The cells become empty again, unless they were shown.
    void give_back();
    // The cache was cleared: the reservation has no cells any more. Waits until a write() in another thread has ended.
    void forget();
    // The caller will not write or show any more. The next call on the context gives the cells back. From any thread
    void abandon() { is_abandoned_ = true; }
    // Doesn't wait for a write() in another thread.
    bool is_abandoned() const { return is_abandoned_; }

private:
    struct group_part {
        std::vector<uint32_t> cells;            // in the order of the positions
        std::vector<std::vector<bool>> written; // for each layer and cell: whether its rows were written
        int32_t first_pos;
        int32_t last_pos;             // both -1 without cells
        std::vector<uint8_t> dithers; // of each cell
    };

    void show(int64_t seq, bool is_text, const float * state);
    void require_live() const;
    void require_written(size_t g, int64_t seq, int64_t last) const;
    void require_state(const float * state);
    int32_t lost_in(const group_part & part, int64_t last) const;

    kv_cache & cache_;
    std::vector<group_part> groups_;
    std::mutex mutex_; // protects is_live_, group_part::written and dithers, and rows while they are written
    bool is_live_ = true;
    std::atomic<bool> is_abandoned_{false};
};

// The reservations of a context that still have cells.
class intake {
public:
    explicit intake(kv_cache & cache) : cache_(cache) {}

    std::shared_ptr<incoming> reserve(const kvg_kv_place * groups, int64_t n_groups);
    // Gives back the cells of reservations that were abandoned.
    void sweep();
    // Call it before the cache is cleared: calls forget() of each reservation.
    void forget_all();

private:
    kv_cache & cache_;
    std::vector<std::shared_ptr<incoming>> open_; // kept until they are abandoned, because sweep() gives their cells back
};

} // namespace kvg
