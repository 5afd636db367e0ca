#include "runtime/reservation.h"

#include <limits>
#include <utility>

#include "fault.h"
#include "memory/slots.h"

namespace kvg {

void cell_changes::undo(kv_cache & cache, size_t n) const noexcept {
    for (size_t g = 0; g < slots.size(); ++g) {
        cells & cells = cache.groups()[g].cells();
        for (size_t i = 0; i < n; ++i) {
            cells.drop(slots[g][i]);
        }
    }
    for (size_t g = 0; g < left.size(); ++g) {
        for (const left_cell & each : left[g]) {
            cache.groups()[g].cells().come_back(each);
        }
    }
}

// The cells of a group at positions where the batch has a token of one of their sequences.
static std::vector<left_cell> replaced_in(const cells & cells, const batch & batch) {
    std::vector<left_cell> replaced;
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        seq_set set = cells.make_set();
        bool any = false;
        each_member(cells.words(i), cells.n_words(), [&](uint32_t seq) {
            if (batch.has_place(seq, cells.pos(i))) {
                set[seq / 64] |= uint64_t{1} << (seq % 64);
                any = true;
            }
        });
        if (any) {
            replaced.push_back({i, cells.pos(i), cells.shift(i), cells.dither(i), std::move(set)});
        }
    }
    return replaced;
}

reservation::reservation(kv_cache & cache, const batch & batch) : cache_(cache), batch_(batch) {
    for (const kv_group & group : cache.groups()) {
        require_room(group.cells(), batch.n_tokens(), "the batch");
    }
    for (kv_group & group : cache.groups()) {
        changes_.slots.push_back(find_slots(group.cells(), batch.n_tokens(), "the batch"));
    }
    if (!batch.repairs()) {
        return;
    }
    std::vector<std::vector<left_cell>> left;
    for (const kv_group & group : cache.groups()) {
        left.push_back(replaced_in(group.cells(), batch));
        fault_point("replace");
    }
    changes_.left = std::move(left); // nothing fails from here on
    for (size_t g = 0; g < changes_.left.size(); ++g) {
        for (const left_cell & each : changes_.left[g]) {
            cache.groups()[g].cells().leave(each);
        }
    }
}

std::vector<std::vector<uint32_t>> reservation::slots_of(uint32_t begin, uint32_t n) const {
    std::vector<std::vector<uint32_t>> cells;
    for (const std::vector<uint32_t> & all : changes_.slots) {
        cells.emplace_back(all.begin() + begin, all.begin() + begin + n);
    }
    return cells;
}

void reservation::put(uint32_t begin, uint32_t n) {
    for (uint32_t i = begin; i < begin + n; ++i) {
        for (size_t g = 0; g < changes_.slots.size(); ++g) {
            cache_.groups()[g].cells().put(changes_.slots[g][i], batch_.positions()[i], batch_.set(i));
        }
        ++n_put_;
    }
}

cell_changes reservation::commit() noexcept {
    n_put_ = 0;
    return std::exchange(changes_, {});
}

void seen_guard::hold(const batch & batch) {
    for (const first_position & first : batch.repairs() ? batch.first_positions() : std::vector<first_position>()) {
        holds_.push_back(cache_.new_hold());
        for (kv_group & group : cache_.groups()) {
            cells & cells = group.cells();
            if (cells.reuses()) {
                cells.hold_after(holds_.back(), first.seq, cells.first_seen(first.pos) - 1, std::numeric_limits<int64_t>::max(),
                                 false);
            }
        }
    }
}

void seen_guard::release() noexcept {
    for (const int64_t hold : holds_) {
        cache_.drop_hold(hold);
    }
    holds_.clear();
}

} // namespace kvg
