// Holds of cells: what keeps them when no sequence sees them.
#include <algorithm>
#include <limits>

#include "error.h"
#include "memory/cells.h"

namespace kvg {

const cells::held_cells & cells::find_hold(int64_t id) const {
    const auto found = holds_.find(id);
    if (found == holds_.end()) {
        fail(KVG_INVALID_ARGUMENT, "this hold was released, by release() or by clear(): hold the cells again");
    }
    return found->second;
}

const pos_index::order & cells::order_of(uint32_t seq) const {
    if (!index_.is_known(seq)) {
        pos_index::order order;
        order.reserve(extents_[seq].n);
        for (uint32_t i = extents_[seq].begin; i < extents_[seq].end; ++i) {
            if (has_seq(i, seq)) {
                order.push_back({pos(i), cells_[i].id});
            }
        }
        index_.set(seq, std::move(order));
    }
    return index_.of(seq);
}

// The cells of the sequence in the range, up to the first gap; returns where that is.
int64_t cells::hold_run(uint32_t seq, held_cells & held) const {
    const pos_index::order & order = order_of(seq);
    const auto before = [](const pos_index::entry & e, int64_t pos) { return e.pos < pos; };
    int64_t next = held.p0;
    for (auto it = std::lower_bound(order.begin(), order.end(), held.p0, before); it != order.end() && it->pos < held.p1;
         ++it) {
        if (it->pos > next) {
            break;
        }
        held.ids.push_back(it->id);
        next = int64_t{it->pos} + 1;
    }
    return next;
}

hold_range cells::hold(int64_t id, int64_t seq, int64_t first, int64_t last) {
    const uint32_t s = check_seq(seq, "sequence");
    const int64_t p0 = std::max<int64_t>(first, 0);
    const int64_t p1 = last < 0 ? int64_t{seq_pos_max(seq)} + 1 : last;
    held_cells held = {p0, p1, {}, reuses_, NOBODY};
    const int64_t next = reuses_ ? had_upto(s, seq_pos_max(s)).first_gap(p0) : hold_run(s, held);
    if (p0 >= p1) {
        fail(KVG_INVALID_ARGUMENT, "no positions from %lld to before %lld: hold at least one that sequence %u sees",
             static_cast<long long>(p0), static_cast<long long>(p1), s);
    }
    if (next < p1) {
        fail(KVG_INVALID_ARGUMENT,
             "sequence %u has no cell at position %lld, so positions %lld to %lld can't be held: "
             "hold a range that it sees all of",
             s, static_cast<long long>(next), static_cast<long long>(p0), static_cast<long long>(p1 - 1));
    }
    const auto added = holds_.emplace(id, std::move(held)).first; // the last that may fail
    for (const uint32_t cell_id : added->second.ids) {
        ++cells_[place_[cell_id]].n_holds;
    }
    return {id, p0, p1};
}

std::vector<uint32_t> cells::held(int64_t hold) const {
    std::vector<uint32_t> found;
    for (const uint32_t id : find_hold(hold).ids) {
        found.push_back(place_[id]);
    }
    std::sort(found.begin(), found.end(), [&](uint32_t a, uint32_t b) { return pos(a) < pos(b); });
    return found;
}

hold_range cells::attach(int64_t hold, int64_t seq, int64_t p1) {
    const held_cells & held = find_hold(hold);
    const uint32_t s = check_seq(seq, "sequence");
    if (const int64_t next = int64_t{std::max(seq_pos_max(seq), lost(seq))} + 1; next != held.p0) {
        fail(KVG_INVALID_ARGUMENT,
             "the hold begins at position %lld and sequence %u goes on at %lld: attach holds that adjoin, the first one from "
             "position 0 to an empty sequence",
             static_cast<long long>(held.p0), s, static_cast<long long>(next));
    }
    const int64_t end = p1 < 0 ? held.p1 : std::min(p1, held.p1);
    if (end <= held.p0) {
        fail(KVG_INVALID_ARGUMENT, "the hold begins at position %lld, so it has none below %lld",
             static_cast<long long>(held.p0), static_cast<long long>(p1));
    }
    for (const uint32_t id : held.ids) {
        if (pos(place_[id]) < end) {
            show(place_[id], s);
        }
    }
    if (reuses_) {
        skip(seq, held.p0, end);
    }
    return {hold, held.p0, end};
}

void cells::skip(int64_t seq, int64_t p0, int64_t p1) {
    const uint32_t s = check_seq(seq, "sequence");
    lost_[s].add(static_cast<int32_t>(p0), static_cast<int32_t>(p1 - 1));
    lose(seq, lost(seq));
}

void cells::hold_window(int64_t id, int64_t seq, int64_t next, bool is_checkpoint) {
    const uint32_t s = check_seq(seq, "sequence");
    const int64_t behind = std::max<int64_t>(lost(seq), next - 1 - window_);
    hold_after(id, s, static_cast<int32_t>(std::max<int64_t>(behind, -1)), next, is_checkpoint);
}

void cells::hold_after(int64_t id, uint32_t seq, int32_t lost, int64_t next, bool is_checkpoint) {
    held_cells held = {int64_t{lost} + 1, next, {}, true, is_checkpoint ? seq : NOBODY};
    for (const pos_index::entry & each : order_of(seq)) {
        if (each.pos > lost && each.pos < next) {
            held.ids.push_back(each.id);
        }
    }
    if (is_checkpoint) {
        checkpoints_[seq].push_back(id);
    }
    try {
        const auto added = holds_.emplace(id, std::move(held)).first; // the last that may fail
        for (const uint32_t cell_id : added->second.ids) {
            ++cells_[place_[cell_id]].n_holds;
        }
    } catch (...) {
        if (is_checkpoint) {
            checkpoints_[seq].pop_back();
        }
        throw;
    }
}

int32_t cells::lost_before(int64_t hold, uint32_t seq) const {
    return had_upto(seq, static_cast<int32_t>(find_hold(hold).p0 - 1)).max();
}

// Positions from the hold on are not lost any more, and those before it are, as far as the sequence has them.
void cells::restore_window(int64_t hold, int64_t seq) {
    const held_cells & held = find_hold(hold);
    const uint32_t s = check_seq(seq, "sequence");
    lose(seq, static_cast<int32_t>(held.p0 - 1));
    lost_[s].remove(held.p0, std::numeric_limits<int64_t>::max());
    const seq_extent own = extents_[s];
    for (uint32_t i = own.begin; i < own.end; ++i) {
        if (has_seq(i, s) && pos(i) >= held.p0) {
            remove_seq(i, s); // or a position would have two cells
        }
    }
    for (const uint32_t id : held.ids) {
        show(place_[id], s);
    }
}

bool cells::keeps_checkpoint(const reposition & change, int64_t hold, int64_t next) const {
    const held_cells & held = find_hold(hold);
    const int32_t before = had_upto(change.seq, static_cast<int32_t>(held.p0 - 1)).after(change).max();
    const auto stays = [&](uint32_t id) {
        const int64_t after = change.after(pos(place_[id]));
        return after < 0 || (after > before && after < next);
    };
    return before < first_seen(static_cast<int32_t>(next)) && std::all_of(held.ids.begin(), held.ids.end(), stays);
}

std::vector<uint32_t> cells::own_holds(uint32_t seq) const {
    std::vector<uint32_t> own(checkpoints_[seq].empty() ? 0 : size(), 0);
    for (const int64_t checkpoint : checkpoints_[seq]) {
        for (const uint32_t id : find_hold(checkpoint).ids) {
            ++own[place_[id]];
        }
    }
    return own;
}

// In the checkpoints of the sequence, the content of dst takes the place of that of src. dst == size(): nothing does.
void cells::move_checkpoints(uint32_t seq, uint32_t src, uint32_t dst) noexcept {
    for (const int64_t checkpoint : checkpoints_[seq]) {
        std::vector<uint32_t> & ids = holds_.find(checkpoint)->second.ids;
        const auto found = std::find(ids.begin(), ids.end(), cells_[src].id);
        if (found == ids.end()) {
            continue;
        }
        --cells_[src].n_holds;
        if (dst < size()) {
            *found = cells_[dst].id;
            ++cells_[dst].n_holds;
        } else {
            ids.erase(found);
        }
    }
}

void cells::release(int64_t hold) {
    const held_cells & held = find_hold(hold);
    for (const uint32_t id : held.ids) {
        const uint32_t i = place_[id];
        --cells_[i].n_holds;
        vacate_if_free(i);
    }
    if (held.owner != NOBODY) {
        std::vector<int64_t> & own = checkpoints_[held.owner];
        own.erase(std::find(own.begin(), own.end(), hold));
    }
    holds_.erase(hold);
}

void cells::check_holds() const {
    std::vector<uint32_t> counted(size(), 0); // holds of each cell
    for (uint32_t i = 0; i < size(); ++i) {
        if (cells_[i].id >= size() || place_[cells_[i].id] != i) {
            fail(KVG_INTERNAL, "cell %u has id %u, whose place is another", i, cells_[i].id);
        }
    }
    for (const auto & [number, held] : holds_) {
        int64_t next = held.p0;
        for (const uint32_t id : held.ids) {
            const uint32_t i = place_.at(id);
            ++counted[i];
            if (held.is_window ? pos(i) < held.p0 || pos(i) >= held.p1 : pos(i) != next && pos(i) != next - 1) {
                fail(KVG_INTERNAL, "hold %lld of positions %lld to %lld has cell %u at %d", static_cast<long long>(number),
                     static_cast<long long>(held.p0), static_cast<long long>(held.p1 - 1), i, pos(i));
            }
            next = int64_t{pos(i)} + 1;
        }
        if (!held.is_window && next != held.p1) {
            fail(KVG_INTERNAL, "hold %lld ends at %lld in place of %lld", static_cast<long long>(number),
                 static_cast<long long>(next), static_cast<long long>(held.p1));
        }
    }
    for (uint32_t i = 0; i < size(); ++i) {
        if (counted[i] != cells_[i].n_holds) {
            fail(KVG_INTERNAL, "cell %u has %u holds, kept: %u", i, counted[i], cells_[i].n_holds);
        }
    }
    for (uint32_t s = 0; s < n_seq_max_; ++s) {
        const pos_index::order & order = index_.of(s);
        const auto seen = [&](const pos_index::entry & e) { return has_seq(place_.at(e.id), s) && pos(place_[e.id]) == e.pos; };
        const auto by_pos = [](const pos_index::entry & a, const pos_index::entry & b) { return a.pos < b.pos; };
        if (index_.is_known(s) && (order.size() != extents_[s].n || !std::all_of(order.begin(), order.end(), seen) ||
                                   !std::is_sorted(order.begin(), order.end(), by_pos))) {
            fail(KVG_INTERNAL, "the order of sequence %u is not that of its %u cells", s, extents_[s].n);
        }
    }
}

} // namespace kvg
