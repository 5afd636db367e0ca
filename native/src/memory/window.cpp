// What windows lose: cells that their sequences have left behind are taken for other tokens.
#include <algorithm>
#include <limits>

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

bool cells::has_lost(int64_t seq, int64_t p0, int64_t p1) const {
    const int64_t end = p1 < 0 ? std::numeric_limits<int64_t>::max() : p1;
    return p0 < end && lost_[check_seq(seq, "sequence")].meets(p0, end);
}

void cells::lose(int64_t seq, int32_t last) {
    const uint32_t s = check_seq(seq, "sequence");
    const seq_extent where = extents_[s];
    for (uint32_t i = where.begin; where.n > 0 && where.pos_min <= last && i < where.end; ++i) {
        if (has_seq(i, s) && pos(i) <= last) {
            lost_[s].add(pos(i), pos(i));
            remove_seq(i, s);
        }
    }
}

void cells::assume_lost(int64_t seq, int32_t last, const cells * all) {
    const uint32_t s = check_seq(seq, "sequence");
    lose(seq, last);
    if (!all && last >= 0) {
        lost_[s].add(0, last);
    }
    for (uint32_t i = 0; all && i < all->n_kv(); ++i) {
        if (all->has_seq(i, s) && all->pos(i) <= last) {
            lost_[s].add(all->pos(i), all->pos(i));
        }
    }
}

void cells::begin_window(int64_t seq, int32_t first) {
    const uint32_t s = check_seq(seq, "sequence");
    lose(seq, first - 1);
    lost_[s].remove(first, std::numeric_limits<int64_t>::max());
    if (first > 0) {
        lost_[s].add(0, first - 1);
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
    std::vector<int32_t> lost(n_seq_max_, -1);
    for (auto each = found.begin(); each != wanted; ++each) {
        each_member(words(each->cell), n_words_, [&](uint32_t s) { lost[s] = std::max(lost[s], pos(each->cell)); });
    }
    for (uint32_t s = 0; s < n_seq_max_; ++s) {
        lose(s, lost[s]);
    }
}

// The positions up to `last` that the sequence has, or has lost.
pos_set cells::had_upto(uint32_t seq, int32_t last) const {
    pos_set had;
    had.add(lost_[seq], 0, int64_t{last} + 1);
    const seq_extent & where = extents_[seq];
    for (uint32_t i = where.begin; i < where.end; ++i) {
        if (has_seq(i, seq) && pos(i) <= last) {
            had.add(pos(i), pos(i));
        }
    }
    return had;
}

// What is lost may come nearer to the sequence's end as long as it stays out of the next token's window.
bool cells::keeps_window(const reposition & change, const pos_set & lost) const {
    const int32_t lost_then = window_ == 0 ? -1 : lost.after(change).max();
    if (lost_then < 0) {
        return true;
    }
    int64_t last = -1;
    const seq_extent & where = extents_[change.seq];
    for (uint32_t i = where.begin; i < where.end; ++i) {
        if (has_seq(i, change.seq)) {
            last = std::max(last, change.after(pos(i)));
        }
    }
    if (chunked_) { // chunks begin where they began, whatever moves
        const bool could_go_on = lost.max() < first_seen(seq_pos_max(change.seq) + 1);
        return !could_go_on || lost_then < first_seen(static_cast<int32_t>(last) + 1);
    }
    const int64_t distance = int64_t{seq_pos_max(change.seq)} - lost.max();
    return last - lost_then >= std::min(distance, int64_t{window_} - 1);
}

void cells::require_window(const reposition & change, const char * op) const {
    const pos_set & lost = lost_[change.seq];
    if (!keeps_window(change, lost)) {
        fail(KVG_UNSUPPORTED,
             "%s would bring positions of sequence %u that a window of %u has lost, those up to %d, into the window of the "
             "tokens that follow; open the context with swa_full=True to keep every position",
             op, change.seq, window_, lost.max());
    }
}

bool cells::may_lose(const reposition & change) const {
    return keeps_window(change, had_upto(change.seq, std::max(lost(change.seq), left_behind(change.seq))));
}

} // namespace kvg
