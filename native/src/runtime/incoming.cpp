#include "runtime/incoming.h"

#include <algorithm>
#include <limits>

#include "error.h"
#include "memory/row_io.h"
#include "memory/slots.h"
#include "runtime/bounded.h"

namespace kvg {

static void check_positions(const kvg_kv_place & place) {
    bounded("n_cells", place.n_cells, 0, std::numeric_limits<int32_t>::max());
    for (int64_t i = 0; i < place.n_cells; ++i) {
        const int32_t lowest = i == 0 ? 0 : place.pos[i - 1] + 1;
        if (place.pos[i] < lowest || (i > 0 && place.pos[i - 1] == std::numeric_limits<int32_t>::max())) {
            fail(KVG_INVALID_ARGUMENT, "position %d of cell %lld: positions start at 0 and rise", place.pos[i],
                 static_cast<long long>(i));
        }
    }
}

// Groups that keep every position keep the same ones, or later calls would be done in one of them and refused by another.
static void check_alike(const kv_cache & cache, const kvg_kv_place * groups) {
    size_t first = cache.groups().size(); // that keeps every position
    for (size_t g = 0; g < cache.groups().size(); ++g) {
        if (cache.groups()[g].spec().window != 0) {
            continue;
        }
        first = std::min(first, g);
        if (!std::equal(groups[first].pos, groups[first].pos + groups[first].n_cells, groups[g].pos,
                        groups[g].pos + groups[g].n_cells)) {
            fail(KVG_INVALID_ARGUMENT, "groups %zu and %zu get other positions: every token has a cell in each of them", first,
                 g);
        }
    }
}

incoming::incoming(kv_cache & cache, const kvg_kv_place * groups, int64_t n_groups) : cache_(cache) {
    cache.require_one_type("cells that come from elsewhere");
    const auto n = static_cast<int64_t>(cache.groups().size());
    bounded("n_groups", n_groups, n, n);
    for (int64_t g = 0; g < n_groups; ++g) {
        check_positions(groups[g]);
    }
    check_alike(cache, groups);
    std::vector<uint32_t> n_cells_of;
    for (int64_t g = 0; g < n_groups; ++g) {
        n_cells_of.push_back(static_cast<uint32_t>(groups[g].n_cells));
    }
    cache.require_cells(n_cells_of, "what comes in");
    for (int64_t g = 0; g < n_groups; ++g) {
        kv_group & group = cache.groups()[static_cast<size_t>(g)];
        const auto n_cells = static_cast<uint32_t>(groups[g].n_cells);
        groups_.push_back({find_slots(group.cells(), n_cells, "what comes in"),
                           std::vector<std::vector<bool>>(group.layers().size(), std::vector<bool>(n_cells, false)),
                           n_cells ? groups[g].pos[0] : -1, n_cells ? groups[g].pos[n_cells - 1] : -1,
                           std::vector<uint8_t>(groups[g].dither, groups[g].dither + n_cells)});
    }
    for (size_t g = 0; g < groups_.size(); ++g) {
        cache.groups()[g].cells().reserve(groups_[g].cells, groups[g].pos, groups[g].dither);
    }
}

void incoming::require_live() const {
    if (!is_live_) {
        fail(KVG_INVALID_ARGUMENT, "these cells were shown or given back, or the cache was cleared: reserve cells again");
    }
}

void incoming::write(const kvg_incoming_rows & in) {
    const auto g = static_cast<size_t>(bounded("group", in.group, 0, static_cast<int64_t>(groups_.size()) - 1));
    group_part & part = groups_[g];
    kv_group & group = cache_.groups()[g];
    const auto n_layers = static_cast<int64_t>(group.layers().size());
    const auto n_cells = static_cast<int64_t>(part.cells.size());
    const int64_t layer_begin = bounded("layer_begin", in.layer_begin, 0, n_layers);
    const int64_t layer_end = bounded("layer_end", in.layer_end, layer_begin, n_layers);
    const int64_t cell_begin = bounded("cell_begin", in.cell_begin, 0, n_cells);
    const int64_t cell_end = bounded("cell_end", in.cell_end, cell_begin, n_cells);
    const auto n = static_cast<uint64_t>(cell_end - cell_begin);
    const layer_range range = {static_cast<size_t>(layer_begin), static_cast<size_t>(layer_end)};
    if (in.n_bytes != rows_bytes(group, range, n)) {
        fail(KVG_INVALID_ARGUMENT, "%llu bytes of K and V, expected %llu for %llu cells in %zu layers",
             (unsigned long long) in.n_bytes, (unsigned long long) rows_bytes(group, range, n), (unsigned long long) n,
             range.size());
    }
    const std::vector<uint32_t> cells(part.cells.begin() + cell_begin, part.cells.begin() + cell_end);
    const std::lock_guard<std::mutex> lock(mutex_);
    require_live();
    if (in.dither) {
        std::copy(in.dither, in.dither + n, part.dithers.begin() + cell_begin);
    }
    const uint8_t * data = in.data;
    for (size_t place = range.begin; place < range.end; ++place) {
        const uint32_t layer = group.layers()[place];
        write_only_rows_of(group.k(layer), cells, data);
        data += n * group.k_row_bytes();
        if (group.v(layer)) {
            write_only_rows_of(group.v(layer), cells, data);
        }
        data += n * group.v_row_bytes();
        std::fill(part.written[place].begin() + cell_begin, part.written[place].begin() + cell_end, true);
    }
}

// What a sequence that ended at `last` has lost in a group, when others have earlier positions than came in for this one.
int32_t incoming::lost_in(const group_part & part, int64_t last) const {
    int32_t lost = -1;
    for (const group_part & other : groups_) {
        const bool is_behind = !other.cells.empty() && (part.cells.empty() || other.first_pos < part.first_pos);
        lost = is_behind ? std::max(lost, part.cells.empty() ? other.last_pos : part.first_pos - 1) : lost;
    }
    return lost > last ? lost : -1;
}

// The sequence goes on at the first of the group's cells, and all of their rows are there.
void incoming::require_written(size_t g, int64_t seq, int64_t last) const {
    const group_part & part = groups_[g];
    if (!part.cells.empty() && part.first_pos <= last) {
        fail(KVG_INVALID_ARGUMENT, "sequence %lld has positions up to %lld, and what came in begins at %d: seq_rm them first",
             static_cast<long long>(seq), static_cast<long long>(last), part.first_pos);
    }
    for (size_t place = 0; place < part.written.size(); ++place) {
        const auto n = static_cast<size_t>(std::count(part.written[place].begin(), part.written[place].end(), true));
        if (n < part.cells.size()) {
            fail(KVG_INVALID_ARGUMENT, "%zu of %zu rows of layer %u were written: write all of them before they are shown", n,
                 part.cells.size(), cache_.groups()[g].layers()[place]);
        }
    }
}

void incoming::require_state(const float * state) {
    if (state && !cache_.states().any()) {
        fail(KVG_INVALID_ARGUMENT, "no layer of this model has a state");
    }
    if (state) {
        cache_.states().forget();
    }
    if (state && !cache_.require_states(1)) {
        fail(KVG_CACHE_FULL, "there is no room for another state; use a larger checkpoint_bytes or n_seq_max");
    }
}

void incoming::show(int64_t seq, bool is_text, const float * state) {
    const std::lock_guard<std::mutex> lock(mutex_);
    require_live();
    const int64_t last = cache_.seq_pos_max(seq);
    for (size_t g = 0; g < groups_.size(); ++g) {
        const class cells & cells = cache_.groups()[g].cells();
        require_written(g, seq, is_text && cells.reuses() ? cells.seq_pos_max(seq) : last);
    }
    require_state(state);
    for (size_t g = 0; g < groups_.size(); ++g) {
        cells & cells = cache_.groups()[g].cells();
        const class cells & first = cache_.groups().front().cells();
        if (is_text && cells.reuses() && !groups_[g].cells.empty()) {
            cells.begin_window(seq, groups_[g].first_pos);
        } else {
            cells.assume_lost(seq, lost_in(groups_[g], last), g == 0 || first.reuses() ? nullptr : &first);
        }
        for (size_t i = 0; i < groups_[g].cells.size(); ++i) {
            cells.set_dither(groups_[g].cells[i], groups_[g].dithers[i]);
        }
        cells.show_reserved(groups_[g].cells, seq);
    }
    if (std::any_of(groups_.begin(), groups_.end(), [](const group_part & part) { return !part.cells.empty(); })) {
        cache_.drop_within(seq, last + 1, -1);
        cache_.forget_states(seq);
    }
    if (state) {
        states & states = cache_.states();
        const uint32_t row = states.take();
        states.rows().write(row, state);
        states.set(static_cast<uint32_t>(seq), row);
        states.drop(row); // the sequence is its user now
    }
    is_live_ = false;
}

void incoming::give_back() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t g = 0; g < groups_.size() && is_live_; ++g) {
        cache_.groups()[g].cells().give_back(groups_[g].cells);
    }
    is_live_ = false;
}

void incoming::forget() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_live_ = false;
}

std::shared_ptr<incoming> intake::reserve(const kvg_kv_place * groups, int64_t n_groups) {
    open_.reserve(open_.size() + 1); // or cells would stay reserved
    auto reserved = std::make_shared<incoming>(cache_, groups, n_groups);
    open_.push_back(reserved);
    return reserved;
}

void intake::sweep() {
    const auto over = [](const std::shared_ptr<incoming> & each) {
        if (each->is_abandoned()) {
            each->give_back();
        }
        return each->is_abandoned();
    };
    open_.erase(std::remove_if(open_.begin(), open_.end(), over), open_.end());
}

void intake::forget_all() {
    for (const std::shared_ptr<incoming> & each : open_) {
        each->forget();
    }
}

} // namespace kvg
