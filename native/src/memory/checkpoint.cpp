// Positions that sequences can come back to: what windows need there is held.
#include <algorithm>
#include <iterator>
#include <limits>

#include "device.h"
#include "error.h"
#include "fault.h"
#include "memory/kv_cache.h"
#include "memory/slots.h"

namespace kvg {

// Whether the state is known that a token at this position goes on from.
bool kv_cache::has_state(uint32_t seq, int64_t pos) const {
    const int64_t next = states_.any() ? next_pos(seq) : 0;
    return next == 0 || pos == 0 || (pos >= next && states_.row_of(seq) != states::NO_ROW);
}

bool kv_cache::can_go_on(uint32_t seq, int64_t pos) const {
    return has_state(seq, pos) && std::all_of(groups_.begin(), groups_.end(), [&](const kv_group & group) {
               return group.cells().can_go_on(seq, static_cast<int32_t>(pos));
           });
}

// The position of the next token, where a sequence has cells and can go on.
int32_t kv_cache::standing(int64_t seq) const {
    const int32_t last = seq_pos_max(seq);
    if (last < 0 || last == std::numeric_limits<int32_t>::max()) {
        fail(KVG_INVALID_ARGUMENT, "sequence %lld %s: there is nothing to come back to", static_cast<long long>(seq),
             last < 0 ? "has no cells" : "can't go on");
    }
    require_seen(static_cast<uint32_t>(seq), last + 1);
    return last + 1;
}

// In every group with a window that loses positions, and of states, or nowhere. Returns the id.
int64_t kv_cache::hold_end(int64_t seq, int32_t next, bool is_checkpoint) {
    const int64_t id = next_hold_++;
    const uint32_t row = states_.any() ? states_.row_of(static_cast<uint32_t>(seq)) : states::NO_ROW;
    hold_place(id, seq, next, row, is_checkpoint);
    return id;
}

int64_t kv_cache::hold_at(uint32_t seq, int32_t next, uint32_t row) {
    const int64_t id = next_hold_++;
    hold_place(id, seq, next, row, true);
    return id;
}

void kv_cache::hold_place(int64_t id, int64_t seq, int32_t next, uint32_t row, bool is_checkpoint) {
    try {
        for (kv_group & group : groups_) {
            if (group.cells().reuses()) {
                group.cells().hold_window(id, seq, next, is_checkpoint);
            }
        }
        fault_point("checkpoint");
        if (states_.any()) {
            states_.hold_row(id, row);
        }
    } catch (...) {
        release_in_all(id);
        throw;
    }
}

hold_range kv_cache::resume_point(int64_t seq, int64_t p) {
    const int32_t end = standing(seq);
    if (p == 0 || p > end) {
        fail(KVG_INVALID_ARGUMENT, "there is nothing to come back to at position %lld: sequence %lld ends before %d",
             static_cast<long long>(p), static_cast<long long>(seq), end);
    }
    const int32_t next = p < 0 ? end : static_cast<int32_t>(p);
    require_seen(static_cast<uint32_t>(seq), next);
    if (states_.any() && resume_points_.size() >= states_.n_kept()) {
        fail(KVG_CACHE_FULL, "there is room for %u resume points of %s each; release some, or use a larger checkpoint_bytes",
             states_.n_kept(), format_bytes(states_.row_bytes()).c_str());
    }
    const int64_t id = hold_end(seq, next, false);
    resume_points_[id] = next;
    return {id, next, next};
}

int32_t kv_cache::keep_checkpoint(int64_t seq) {
    const int32_t next = standing(seq);
    checkpoints_.reserve(checkpoints_.size() + 1); // or cells would stay held
    const int64_t id = hold_end(seq, next, true);
    drop_if([&](const checkpoint & c) { return c.seq == seq && c.p == next; });
    checkpoints_.push_back({static_cast<uint32_t>(seq), next, id, ++n_used_});
    return next;
}

// In rising order of positions.
std::vector<checkpoint> kv_cache::checkpoints_of(int64_t seq) const {
    seq_pos_max(seq); // refuses what is no sequence
    std::vector<checkpoint> found;
    std::copy_if(checkpoints_.begin(), checkpoints_.end(), std::back_inserter(found),
                 [&](const checkpoint & each) { return each.seq == seq; });
    std::sort(found.begin(), found.end(), [](const checkpoint & a, const checkpoint & b) { return a.p < b.p; });
    return found;
}

std::vector<int32_t> kv_cache::checkpoints(int64_t seq) const {
    std::vector<int32_t> positions;
    for (const checkpoint & each : checkpoints_of(seq)) {
        positions.push_back(each.p);
    }
    return positions;
}

void kv_cache::checkpoints_lost(int64_t seq, size_t group, int32_t * out) const {
    const cells & cells = groups_[group].cells();
    for (const checkpoint & c : checkpoints_of(seq)) {
        *out++ = cells.has_hold(c.hold) ? cells.lost_before(c.hold, c.seq) : cells.lost(seq);
    }
}

void kv_cache::add_checkpoint(int64_t seq, int32_t p, int64_t hold) {
    checkpoints_.push_back({static_cast<uint32_t>(seq), p, hold, ++n_used_});
}

std::vector<uint32_t> kv_cache::checkpoint_states(int64_t seq) const {
    std::vector<uint32_t> rows;
    for (const checkpoint & each : checkpoints_of(seq)) {
        rows.push_back(states_.held(each.hold));
    }
    return rows;
}

std::vector<kept_state> kv_cache::kept_states() const {
    std::vector<kept_state> kept;
    const auto add = [&](int64_t hold, int32_t p) {
        if (states_.has_hold(hold)) {
            kept.push_back({states_.held(hold), p});
        }
    };
    for (const checkpoint & each : checkpoints_) {
        add(each.hold, each.p);
    }
    for (const auto & [hold, p] : resume_points_) {
        add(hold, p);
    }
    return kept;
}

// The lowest position that a checkpoint leads back to: its own, or one before it that needs nothing which is not held.
int64_t kv_cache::reaches(const checkpoint & c) const {
    int64_t lowest = states_.any() ? c.p : 0;
    for (const kv_group & group : groups_) {
        const cells & cells = group.cells();
        if (const int32_t lost = cells.has_hold(c.hold) ? cells.lost_before(c.hold, c.seq) : cells.lost(c.seq); lost >= 0) {
            lowest = std::max(lowest, int64_t{lost} + group.spec().window);
        }
    }
    return lowest;
}

// The checkpoint that leads back to the highest position up to p; nullptr: none does.
const checkpoint * kv_cache::find_checkpoint(uint32_t seq, int64_t p) const {
    const checkpoint * found = nullptr;
    for (const checkpoint & each : checkpoints_) {
        if (each.seq == seq && reaches(each) <= std::min<int64_t>(p, each.p) &&
            (!found || std::min<int64_t>(each.p, p) > std::min<int64_t>(found->p, p))) {
            found = &each;
        }
    }
    return found;
}

// Shows the sequence what a checkpoint holds that leads back to p, unless it can go on there already.
void kv_cache::restore(uint32_t seq, int64_t p) {
    const checkpoint * found = can_go_on(seq, p) ? nullptr : find_checkpoint(seq, p);
    if (!found || found->p < p) {
        return;
    }
    checkpoints_[static_cast<size_t>(found - checkpoints_.data())].used = ++n_used_;
    restore_hold(found->hold, seq);
}

int32_t kv_cache::rewind(int64_t seq, int64_t p) {
    int64_t there = std::clamp<int64_t>(p, 0, next_pos(seq));
    if (!can_go_on(static_cast<uint32_t>(seq), there)) {
        const checkpoint * found = find_checkpoint(static_cast<uint32_t>(seq), there);
        there = found ? std::min<int64_t>(found->p, there) : 0;
    }
    seq_rm(seq, there, -1);
    return static_cast<int32_t>(there);
}

// The one nearest to its neighbours, of those equally near the one that was not used for longest. precondition: there is any
static std::vector<checkpoint>::iterator least_useful(std::vector<checkpoint> & all) {
    const auto gap = [&](const checkpoint & c) {
        int64_t nearest = c.p; // from the beginning, where there always is a way back to
        for (const checkpoint & other : all) {
            if (other.seq == c.seq && other.p != c.p) {
                nearest = std::min(nearest, std::abs(int64_t{other.p} - c.p));
            }
        }
        return nearest;
    };
    return std::min_element(all.begin(), all.end(), [&](const checkpoint & a, const checkpoint & b) {
        const int64_t gap_a = gap(a);
        const int64_t gap_b = gap(b);
        return gap_a != gap_b ? gap_a < gap_b : a.used < b.used;
    });
}

bool kv_cache::drop_least() {
    const bool any = !checkpoints_.empty();
    if (any) {
        const auto least = least_useful(checkpoints_);
        release_in_all(least->hold);
        checkpoints_.erase(least);
    }
    return any;
}

// Cells that are empty or may be reused once all checkpoints have made way.
uint32_t kv_cache::n_available(const cells & cells) const {
    if (checkpoints_.empty()) {
        return cells.n_available();
    }
    class cells left = cells;
    for (const checkpoint & each : checkpoints_) {
        if (left.has_hold(each.hold)) {
            left.release(each.hold);
        }
    }
    return left.n_available();
}

std::vector<cells> kv_cache::copy_cells() const {
    std::vector<cells> copies;
    for (const kv_group & group : groups_) {
        copies.push_back(group.cells());
    }
    return copies;
}

std::vector<int64_t> kv_cache::making_way(std::vector<cells> & next, const std::vector<uint32_t> & n, uint32_t n_states,
                                          int64_t seq) const {
    std::vector<checkpoint> left = checkpoints_;
    std::vector<int64_t> gone;
    const auto is_enough = [&] {
        for (size_t g = 0; g < next.size(); ++g) {
            if (next[g].reuses() && n[g] > next[g].n_available()) {
                return false;
            }
        }
        return !states_.any() || states_.n_free_without(gone, seq) >= n_states;
    };
    while (!is_enough()) {
        if (left.empty()) {
            return {};
        }
        const auto least = least_useful(left);
        gone.push_back(least->hold);
        for (cells & cells : next) {
            if (cells.has_hold(least->hold)) {
                cells.release(least->hold);
            }
        }
        left.erase(least);
    }
    return gone;
}

bool kv_cache::require_states(uint32_t n) {
    if (states_.n_free() < n) {
        std::vector<cells> no_cells;
        drop_those(making_way(no_cells, {}, n, cells::NOBODY));
    }
    return states_.n_free() >= n;
}

// Groups without a window come first, so that no checkpoint is dropped for what they refuse.
void kv_cache::require_cells(const std::vector<uint32_t> & n, const char * what) {
    for (const bool reuses : {false, true}) {
        bool is_short = false;
        for (size_t g = 0; g < groups_.size(); ++g) {
            is_short = is_short || (reuses && groups_[g].cells().reuses() && n[g] > groups_[g].cells().n_available());
        }
        if (is_short) {
            std::vector<cells> next = copy_cells();
            drop_those(making_way(next, n, 0, cells::NOBODY));
        }
        for (size_t g = 0; g < groups_.size(); ++g) {
            if (groups_[g].cells().reuses() == reuses) {
                kvg::require_room(groups_[g].cells(), n[g], what);
            }
        }
    }
}

template <class F> void kv_cache::drop_if(F is_over) {
    for (auto each = checkpoints_.begin(); each != checkpoints_.end();) {
        if (is_over(*each)) {
            release_in_all(each->hold);
            each = checkpoints_.erase(each);
        } else {
            ++each;
        }
    }
}

void kv_cache::drop_within(int64_t seq, int64_t p0, int64_t p1) {
    drop_if([&](const checkpoint & c) { return (seq < 0 || c.seq == seq) && p0 < c.p && (p1 < 0 || c.p < p1); });
}

void kv_cache::drop_within(uint32_t seq, const std::vector<int32_t> & positions) {
    const auto goes = [&](int32_t pos) { return std::binary_search(positions.begin(), positions.end(), pos); };
    drop_if([&](const checkpoint & c) { return c.seq == seq && goes(c.p - 1) && goes(c.p); });
}

void kv_cache::drop_over(uint32_t seq, int32_t pos) {
    drop_if([&](const checkpoint & c) {
        return c.seq == seq && pos < c.p &&
               std::any_of(
                   groups_.begin(), groups_.end(),
                   [&](const kv_group & group) {
                       return group.cells().has_hold(c.hold) && group.cells().first_held(c.hold) <= pos;
                   });
    });
}

// Those that only lead to a sequence without cells, whose state would be zeros.
void kv_cache::drop_hopeless() {
    drop_if([&](const checkpoint & c) {
        return std::none_of(groups_.begin(), groups_.end(), [&](const kv_group & group) {
            const int32_t first = group.cells().seq_pos_min(c.seq);
            return (first >= 0 && first < c.p) || group.cells().lost(c.seq) >= 0;
        });
    });
}

// Nothing may change sides: what came before a checkpoint comes before it afterwards, what came after it comes after it.
bool kv_cache::moves_along(const checkpoint & c, const reposition & change) const {
    const int64_t next = change.after(c.p);
    const cells & first = groups_.front().cells();
    if (next < 1 || next > std::numeric_limits<int32_t>::max()) {
        return false;
    }
    for (uint32_t i = 0; i < first.n_kv(); ++i) {
        if (first.has_seq(i, c.seq) && (first.pos(i) < c.p) != (change.after(first.pos(i)) < next)) {
            return false;
        }
    }
    return std::all_of(groups_.begin(), groups_.end(), [&](const kv_group & group) {
        const cells & cells = group.cells();
        return !cells.has_hold(c.hold) || cells.keeps_checkpoint(change, c.hold, next);
    });
}

// A division brings positions together that stay apart in the checkpoint's text: those that it touches stay behind.
std::vector<int64_t> kv_cache::unmoved(const reposition & change) const {
    int64_t window = 0;
    for (const kv_group & group : groups_) {
        window = std::max<int64_t>(window, group.spec().window);
    }
    std::vector<int64_t> holds;
    for (const checkpoint & c : checkpoints_) {
        const bool is_divided = change.d > 1 && change.p0 < c.p && change.p1 > int64_t{c.p} - window;
        if (c.seq == change.seq && change.moves() && (is_divided || !moves_along(c, change))) {
            holds.push_back(c.hold);
        }
    }
    return holds;
}

bool kv_cache::drop_those(const std::vector<int64_t> & holds) {
    const size_t n = checkpoints_.size();
    drop_if([&](const checkpoint & c) { return std::find(holds.begin(), holds.end(), c.hold) != holds.end(); });
    return checkpoints_.size() < n;
}

void kv_cache::move_checkpoints(const reposition & change) {
    for (checkpoint & each : checkpoints_) {
        each.p = static_cast<int32_t>(each.seq == change.seq ? change.after(each.p) : each.p);
    }
    drop_if([&](const checkpoint & c) {
        return std::any_of(checkpoints_.begin(), checkpoints_.end(), [&](const checkpoint & other) {
            return other.seq == c.seq && other.p == c.p && other.used > c.used;
        });
    });
    settle_states();
}

} // namespace kvg
