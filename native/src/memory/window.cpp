// What windows lose: cells that their sequences have left behind are taken for other tokens.
#include <algorithm>

#include "error.h"
#include "memory/cells.h"

namespace kvg {

namespace {

// What nobody needs any more, and for how long.
struct reusable_cell {
    uint32_t cell;
    int32_t behind; // positions, of the sequence that needed it last
};

} // namespace

// Nothing is taken from a sequence without need, so that it can go back: a set is what has to be.
void cells::set_lost(int64_t seq, int32_t lost) {
    const uint32_t s = check_seq(seq, "sequence");
    if (lost <= lost_[s]) {
        return;
    }
    lost_[s] = lost;
    const seq_extent where = extents_[s];
    for (uint32_t i = where.begin; where.n > 0 && where.pos_min <= lost && i < where.end; ++i) {
        if (has_seq(i, s) && pos(i) <= lost) {
            remove_seq(i, s);
        }
    }
}

// Not what the last token itself attends to: it may be removed, and decoded again.
int32_t cells::left_behind(uint32_t seq) const {
    return static_cast<int32_t>(std::max<int64_t>(-1, int64_t{seq_pos_max(seq)} - window_));
}

bool cells::is_reusable(uint32_t i, uint32_t kept) const {
    if (is_empty(i) || n_holds(i) > 0 || is_reserved(i)) {
        return false;
    }
    bool left = true;
    each_member(words(i), n_words_, [&](uint32_t s) { left = left && s != kept && pos(i) <= left_behind(s); });
    return left;
}

uint32_t cells::n_available(uint32_t kept) const {
    uint32_t n = size() - n_used_;
    for (uint32_t i = 0; reuses_ && i < n_kv_; ++i) {
        n += is_reusable(i, kept);
    }
    return n;
}

void cells::make_room(uint32_t n, uint32_t kept) {
    if (n <= size() - n_used_) {
        return;
    }
    std::vector<reusable_cell> found;
    for (uint32_t i = 0; i < n_kv_; ++i) {
        if (is_reusable(i, kept)) {
            int32_t behind = std::numeric_limits<int32_t>::max();
            each_member(words(i), n_words_, [&](uint32_t s) { behind = std::min(behind, seq_pos_max(s) - pos(i)); });
            found.push_back({i, behind});
        }
    }
    const auto wanted = found.begin() + (n - (size() - n_used_));
    std::nth_element(found.begin(), wanted - 1, found.end(), [](const reusable_cell & a, const reusable_cell & b) {
        return a.behind != b.behind ? a.behind > b.behind : a.cell < b.cell;
    });
    std::vector<int32_t> lost = lost_;
    for (auto each = found.begin(); each != wanted; ++each) {
        each_member(words(each->cell), n_words_, [&](uint32_t s) { lost[s] = std::max(lost[s], pos(each->cell)); });
    }
    for (uint32_t s = 0; s < n_seq_max_; ++s) {
        set_lost(s, lost[s]);
    }
}

// Without the other groups all positions up to the highest one that is lost count as lost, also those that nobody had.
int32_t cells::lost_without(uint32_t seq, int64_t p0, int64_t p1) const {
    const int32_t lost = lost_[seq];
    return lost >= p0 && lost < p1 ? static_cast<int32_t>(p0 - 1) : lost;
}

int32_t cells::lost_after(const reposition & change, const cells & all, int32_t lost) const {
    int64_t after = -1;
    if (!all.reuses_) {
        const seq_extent & where = all.extents_[change.seq];
        for (uint32_t i = where.begin; lost >= 0 && i < where.end; ++i) {
            if (all.has_seq(i, change.seq) && all.pos(i) <= lost) {
                after = std::max(after, all.affects(change, i) ? change.next(all.pos(i)) : int64_t{all.pos(i)});
            }
        }
    } else {
        after = lost < change.p1 ? std::min<int64_t>(lost, change.p0 - 1) : lost;
        if (lost >= change.p0) {
            after = std::max(after, change.next(static_cast<int32_t>(std::min<int64_t>(lost, change.p1 - 1))));
        }
    }
    return static_cast<int32_t>(std::clamp<int64_t>(after, -1, std::numeric_limits<int32_t>::max()));
}

// What is lost may come nearer to the sequence's end as long as it stays out of the next token's window.
bool cells::keeps_window(const reposition & change, const cells & all, int32_t lost) const {
    const int32_t lost_then = window_ == 0 || lost < 0 ? -1 : lost_after(change, all, lost);
    if (lost_then < 0) {
        return true;
    }
    int64_t last = -1;
    const seq_extent & where = extents_[change.seq];
    for (uint32_t i = where.begin; i < where.end; ++i) {
        if (has_seq(i, change.seq)) {
            last = std::max(last, affects(change, i) ? change.next(pos(i)) : int64_t{pos(i)});
        }
    }
    const int64_t distance = int64_t{seq_pos_max(change.seq)} - lost;
    return last - lost_then >= std::min(distance, int64_t{window_} - 1);
}

void cells::require_window(const reposition & change, const cells & all, const char * op) const {
    const int32_t lost = lost_[change.seq];
    if (!keeps_window(change, all, lost)) {
        fail(KVG_UNSUPPORTED,
             "%s would bring positions of sequence %u that a window of %u has lost, those up to %d, into the window of the "
             "tokens that follow; open the context with swa_full=True to keep every position",
             op, change.seq, window_, lost);
    }
}

bool cells::may_lose(const reposition & change, const cells & all) const {
    return keeps_window(change, all, std::max(lost_[change.seq], left_behind(change.seq)));
}

void cells::move_lost(uint32_t seq, int32_t lost) {
    lost_[seq] = -1;
    set_lost(seq, lost);
}

void cells::tighten_lost(uint32_t seq, const cells & all) {
    int32_t highest = -1;
    const seq_extent & where = all.extents_[seq];
    for (uint32_t i = where.begin; i < where.end; ++i) {
        if (all.has_seq(i, seq) && all.pos(i) <= lost_[seq]) {
            highest = std::max(highest, all.pos(i));
        }
    }
    lost_[seq] = highest;
}

} // namespace kvg
