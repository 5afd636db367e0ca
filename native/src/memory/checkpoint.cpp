// Positions that sequences can come back to: what windows need there is held.
#include <algorithm>
#include <limits>

#include "error.h"
#include "memory/kv_cache.h"

namespace kvg {

bool kv_cache::can_go_on(uint32_t seq, int64_t pos) const {
    return std::all_of(groups_.begin(), groups_.end(),
                       [&](const kv_group & group) { return group.cells().can_go_on(seq, static_cast<int32_t>(pos)); });
}

// In every group with a window that loses positions, or in none.
void kv_cache::hold_windows(int64_t id, int64_t seq) {
    try {
        for (kv_group & group : groups_) {
            if (group.cells().reuses()) {
                group.cells().hold_window(id, seq);
            }
        }
    } catch (...) {
        release_in_all(id);
        throw;
    }
}

hold_range kv_cache::resume_point(int64_t seq) {
    const int32_t last = seq_pos_max(seq);
    if (last < 0 || last == std::numeric_limits<int32_t>::max()) {
        fail(KVG_INVALID_ARGUMENT, "sequence %lld %s: there is nothing to come back to", static_cast<long long>(seq),
             last < 0 ? "has no cells" : "can't go on");
    }
    require_seen(static_cast<uint32_t>(seq), last + 1);
    const int64_t id = next_hold_++;
    resume_points_[id] = last + 1;
    hold_windows(id, seq);
    return {id, last + 1, last + 1};
}

int32_t kv_cache::keep_checkpoint(int64_t seq) {
    checkpoints_.reserve(checkpoints_.size() + 1); // or cells would stay held
    const hold_range point = resume_point(seq);
    const auto same = [&](const checkpoint & c) { return c.seq == seq && c.p == point.p0; };
    const auto before = std::find_if(checkpoints_.begin(), checkpoints_.end(), same);
    if (before != checkpoints_.end()) {
        release_in_all(before->hold);
        checkpoints_.erase(before);
    }
    const auto p = static_cast<int32_t>(point.p0);
    checkpoints_.push_back({static_cast<uint32_t>(seq), p, point.id, ++n_used_});
    return p;
}

std::vector<int32_t> kv_cache::checkpoints(int64_t seq) const {
    seq_pos_max(seq); // refuses what is no sequence
    std::vector<int32_t> positions;
    for (const checkpoint & each : checkpoints_) {
        if (each.seq == seq) {
            positions.push_back(each.p);
        }
    }
    std::sort(positions.begin(), positions.end());
    return positions;
}

// The last one at or before p; nullptr: none.
const checkpoint * kv_cache::find_checkpoint(uint32_t seq, int64_t p) const {
    const checkpoint * found = nullptr;
    for (const checkpoint & each : checkpoints_) {
        if (each.seq == seq && each.p <= p && (!found || each.p > found->p)) {
            found = &each;
        }
    }
    return found;
}

int32_t kv_cache::rewind(int64_t seq, int64_t p) {
    const int64_t wanted = std::clamp<int64_t>(p, 0, int64_t{seq_pos_max(seq)} + 1);
    const auto s = static_cast<uint32_t>(seq);
    if (can_go_on(s, wanted)) {
        seq_rm(seq, wanted, -1);
        return static_cast<int32_t>(wanted);
    }
    const checkpoint * found = find_checkpoint(s, wanted);
    if (!found) {
        seq_rm(seq, 0, -1);
        return 0;
    }
    const checkpoint kept = *found;
    checkpoints_[static_cast<size_t>(found - checkpoints_.data())].used = ++n_used_;
    drop_spoiled(seq, kept.p, -1);
    for (kv_group & group : groups_) {
        group.cells().seq_rm(seq, kept.p, -1);
        if (group.cells().has_hold(kept.hold)) {
            group.cells().restore_window(kept.hold, seq);
        }
    }
    return kept.p;
}

// The one nearest to its neighbours, of those equally near the one that was not used for longest.
std::vector<checkpoint>::iterator kv_cache::least_useful() {
    const auto gap = [&](const checkpoint & c) {
        int64_t nearest = c.p; // from the beginning, where there always is a way back to
        for (const checkpoint & other : checkpoints_) {
            if (other.seq == c.seq && other.p != c.p) {
                nearest = std::min(nearest, std::abs(int64_t{other.p} - c.p));
            }
        }
        return nearest;
    };
    return std::min_element(checkpoints_.begin(), checkpoints_.end(), [&](const checkpoint & a, const checkpoint & b) {
        const int64_t gap_a = gap(a);
        const int64_t gap_b = gap(b);
        return gap_a != gap_b ? gap_a < gap_b : a.used < b.used;
    });
}

void kv_cache::drop_for(uint32_t n) {
    for (kv_group & group : groups_) {
        while (group.cells().reuses() && !checkpoints_.empty() && n > group.cells().n_available()) {
            const auto least = least_useful();
            release_in_all(least->hold);
            checkpoints_.erase(least);
        }
    }
}

// Before a checkpoint, nothing of its windows may change; what lies before these may, where the full groups follow.
void kv_cache::drop_spoiled(int64_t seq, int64_t p0, int64_t p1) {
    uint32_t window = 0;
    for (const kv_group & group : groups_) {
        window = std::max(window, group.spec().window);
    }
    const auto is_spoiled = [&](const checkpoint & c) {
        return (seq < 0 || c.seq == seq) && p0 < c.p && (p1 < 0 || p1 > int64_t{c.p} - window);
    };
    for (auto each = checkpoints_.begin(); each != checkpoints_.end();) {
        if (is_spoiled(*each)) {
            release_in_all(each->hold);
            each = checkpoints_.erase(each);
        } else {
            ++each;
        }
    }
}

} // namespace kvg
