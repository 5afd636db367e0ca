// The operations of the public interface on the cells of sequences: seq_rm, seq_cp, seq_keep, seq_add, seq_div.
#include <algorithm>
#include <limits>

#include "error.h"
#include "memory/cells.h"
#include "memory/pos_range.h"

namespace kvg {

static constexpr int64_t POS_MAX = std::numeric_limits<int32_t>::max();

// Neither the sequence nor its checkpoints have the cell any more.
void cells::take_from(uint32_t i, uint32_t seq) {
    move_checkpoints(seq, i, size());
    if (has_seq(i, seq)) {
        remove_seq(i, seq);
    } else {
        vacate_if_free(i);
    }
}

void cells::seq_rm(int64_t seq, int64_t p0, int64_t p1) {
    const pos_range range(p0, p1);
    const uint32_t begin = seq < 0 ? 0 : check_seq(seq, "sequence");
    const uint32_t end = seq < 0 ? n_seq_max_ : begin + 1;
    for (uint32_t s = begin; s < end; ++s) {
        lost_[s].remove(range.p0, range.p1);
        each_affected({s, range.p0, range.p1, 1, 0}, [&](uint32_t i, uint32_t) { take_from(i, s); });
    }
}

void cells::seq_rm_at(int64_t seq, const std::vector<int32_t> & positions) {
    const uint32_t s = check_seq(seq, "sequence");
    for (const int32_t each : positions) {
        lost_[s].remove(each, int64_t{each} + 1);
    }
    each_affected({s, positions.front(), int64_t{positions.back()} + 1, 1, 0}, [&](uint32_t i, uint32_t) {
        if (std::binary_search(positions.begin(), positions.end(), pos(i))) {
            take_from(i, s);
        }
    });
}

void cells::seq_cp(int64_t src, int64_t dst, int64_t p0, int64_t p1) {
    const uint32_t from = check_seq(src, "source sequence");
    const uint32_t to = check_seq(dst, "destination sequence");
    const pos_range range(p0, p1);
    const seq_extent where = extents_[from];
    lost_[to].add(lost_[from], range.p0, range.p1);
    lose(to, lost(to));
    for (uint32_t i = where.begin; i < where.end; ++i) {
        if (!has_seq(i, from) || !range.contains(pos(i)) || has_seq(i, to)) {
            continue;
        }
        if (pos(i) > lost(to)) {
            show(i, to);
        } else { // it comes among positions that are lost, and counts as one of them
            lost_[to].add(pos(i), pos(i));
        }
    }
}

void cells::seq_keep(int64_t seq) {
    const uint32_t s = check_seq(seq, "sequence");
    for (uint32_t i = 0, end = n_kv_; i < end; ++i) {
        each_member(words(i), n_words_, [&](uint32_t other) {
            if (other != s) {
                remove_seq(i, other);
            }
        });
    }
    for (uint32_t other = 0; other < n_seq_max_; ++other) {
        if (other != s) {
            lost_[other] = {};
        }
    }
}

// Calls visit(i, n) for the cells in the range of the change that the sequence sees or that n of its checkpoints hold.
template <class F> void cells::each_affected(const reposition & change, F visit) const {
    const std::vector<uint32_t> own = own_holds(change.seq);
    const uint32_t begin = own.empty() ? extents_[change.seq].begin : 0;
    const uint32_t end = own.empty() ? extents_[change.seq].end : n_kv_;
    for (uint32_t i = begin; i < end; ++i) {
        const uint32_t n_own = own.empty() ? 0 : own[i];
        if (change.contains(pos(i)) && (has_seq(i, change.seq) || n_own > 0)) {
            visit(i, n_own);
        }
    }
}

reposition cells::check_add(int64_t seq, int64_t p0, int64_t p1, int64_t delta) const {
    const pos_range range(p0, p1);
    // beyond these bounds every position falls off the same end
    const int64_t bounded = std::clamp<int64_t>(delta, -2 * POS_MAX, 2 * POS_MAX);
    const reposition change = {check_seq(seq, "sequence"), range.p0, range.p1, 1, bounded};
    each_affected(change, [&](uint32_t i, uint32_t) {
        if (change.next(pos(i)) > POS_MAX) {
            fail(KVG_INVALID_ARGUMENT, "seq_add by %lld would move position %d past the largest, %lld",
                 static_cast<long long>(delta), pos(i), static_cast<long long>(POS_MAX));
        }
    });
    return change;
}

reposition cells::check_div(int64_t seq, int64_t p0, int64_t p1, int64_t d) const {
    const pos_range range(p0, p1);
    const uint32_t s = check_seq(seq, "sequence");
    if (d < 1) {
        fail(KVG_INVALID_ARGUMENT, "seq_div by %lld: the divisor must be at least 1", static_cast<long long>(d));
    }
    return {s, range.p0, range.p1, d, 0};
}

// A shared cell that would fall below 0 needs no copy: it only loses the sequence. The sequence's checkpoints don't share: they move along.
std::vector<uint32_t> cells::shared_in(const reposition & change) const {
    std::vector<uint32_t> shared;
    each_affected(change, [&](uint32_t i, uint32_t n_own) {
        uint32_t n_others = n_holds(i) - n_own;
        each_member(words(i), n_words_, [&](uint32_t s) { n_others += s != change.seq; });
        if (n_others > 0 && change.next(pos(i)) >= 0 && change.next(pos(i)) != pos(i)) {
            shared.push_back(i);
        }
    });
    return shared;
}

void cells::move_cell(uint32_t i, int32_t pos, uint32_t seq) {
    const bool seen = has_seq(i, seq);
    if (seen) {
        extents_[seq].remove(cells_[i].pos, i);
        index_.forget(seq);
    }
    // fits: the sum is the position now minus the position at the last rotation, both in 0 .. 2^31 - 1
    set_shift(i, static_cast<int32_t>(int64_t{shift(i)} + pos - cells_[i].pos));
    cells_[i].pos = pos;
    if (seen) {
        extents_[seq].add(pos, i);
    }
}

void cells::apply(const reposition & change) {
    for (const int64_t checkpoint : checkpoints_[change.seq]) {
        held_cells & held = holds_.find(checkpoint)->second;
        held.p0 = int64_t{had_upto(change.seq, static_cast<int32_t>(held.p0 - 1)).after(change).max()} + 1;
        held.p1 = change.after(held.p1);
    }
    lost_[change.seq] = lost_[change.seq].after(change);
    each_affected(change, [&](uint32_t i, uint32_t) {
        const int64_t next = change.next(pos(i));
        if (next < 0) {
            take_from(i, change.seq);
        } else if (next != pos(i)) {
            move_cell(i, static_cast<int32_t>(next), change.seq);
        }
    });
    lose(change.seq, lost(change.seq));
}

} // namespace kvg
