#include "runtime/transfer.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <set>
#include <utility>

#include "device.h"
#include "error.h"
#include "fault.h"
#include "memory/row_io.h"
#include "memory/slots.h"
#include "runtime/bounded.h"
#include "runtime/loaded_states.h"

namespace kvg {

static void require_above(const cells & cells, uint32_t seq, int32_t lost) {
    const int32_t lowest = cells.seq_pos_min(seq);
    if (lost < -1 || (lowest >= 0 && lowest <= lost)) {
        fail(KVG_INVALID_ARGUMENT, "sequence %u has a cell at position %d, and positions up to %d are said to be lost", seq,
             lowest, lost);
    }
}

// The i-th row's flag of a sequence.
static bool flag(const uint8_t * flags, const cells & cells, uint32_t i, uint32_t seq) {
    return flags && flags[static_cast<size_t>(i) * cells.n_seq_max() + seq] != 0;
}

// Puts cells where they go. The sequences whose checkpoints keep a cell see it, too, until these are there.
static std::vector<uint32_t> put_all(cells & next, const kvg_kv_rows & in) {
    const auto n = static_cast<uint32_t>(in.n_cells);
    const std::vector<uint32_t> slots = find_slots(next, n, "what is loaded");
    for (uint32_t i = 0; i < n; ++i) {
        seq_set set = next.make_set();
        bool needed = false;
        for (uint32_t s = 0; s < next.n_seq_max(); ++s) {
            const bool member = flag(in.seq, next, i, s) || flag(in.kept, next, i, s);
            set[s / 64] |= static_cast<uint64_t>(member) << (s % 64);
            needed = needed || member;
        }
        if (in.pos[i] < 0 || !needed) {
            fail(KVG_INVALID_ARGUMENT, "cell %u of %u has position %d and %s", i, n, in.pos[i],
                 needed ? "a sequence" : "no sequence");
        }
        next.put(slots[i], in.pos[i], set);
        next.set_dither(slots[i], in.dither[i]);
    }
    return slots;
}

// holds: ids for the checkpoints
static void put_checkpoints(cells & next, const kv_group & group, size_t g, size_t n_groups,
                            const kvg_kv_checkpoint_list & checkpoints, const std::vector<int64_t> & holds) {
    for (size_t c = 0; c < holds.size() && group.spec().window > 0; ++c) {
        const int64_t lost = checkpoints.lost[c * n_groups + g];
        const int64_t behind = next.reuses() ? int64_t{checkpoints.p[c]} - 1 - group.spec().window : -1;
        if (next.reuses() || lost >= 0) {
            next.hold_after(holds[c], static_cast<uint32_t>(checkpoints.seq[c]), static_cast<int32_t>(std::max(lost, behind)),
                            checkpoints.p[c], true);
        }
    }
}

// Puts these cells in place of a sequence's, which has none any more; returns where they are. all: the cells of a group that keeps every
// position; nullptr: there is none
static std::vector<uint32_t> replace_cells(cells & next, int64_t seq, const kvg_kv_rows & in, const cells * all,
                                           const std::function<void(cells &)> & add_checkpoints) {
    std::vector<uint32_t> slots = put_all(next, in);
    add_checkpoints(next);
    for (uint32_t i = 0; i < slots.size(); ++i) {
        for (uint32_t s = 0; s < next.n_seq_max(); ++s) {
            if (flag(in.kept, next, i, s) && !flag(in.seq, next, i, s)) {
                next.leave(slots[i], s);
            }
        }
    }
    for (uint32_t s = 0; in.lost && s < next.n_seq_max(); ++s) {
        if (seq < 0 || seq == s) {
            require_above(next, s, in.lost[s]);
            next.assume_lost(s, in.lost[s], all);
        }
    }
    return slots;
}

// Each of a sequence that is replaced, at most one at a position.
static void check_checkpoints(int64_t seq, uint32_t n_seq_max, size_t n_groups, const kvg_kv_checkpoint_list & in) {
    constexpr int64_t POS_MAX = std::numeric_limits<int32_t>::max();
    bounded("n", in.n, 0, POS_MAX);
    std::set<std::pair<int32_t, int32_t>> known;
    for (int64_t c = 0; c < in.n; ++c) {
        bounded("a checkpoint's sequence", in.seq[c], std::max<int64_t>(seq, 0), seq < 0 ? int64_t{n_seq_max} - 1 : seq);
        bounded("a checkpoint's position", in.p[c], 1, POS_MAX);
        if (!known.insert({in.seq[c], in.p[c]}).second) {
            fail(KVG_INVALID_ARGUMENT, "sequence %d has two checkpoints at position %d", in.seq[c], in.p[c]);
        }
        for (size_t g = 0; g < n_groups; ++g) {
            bounded("what a checkpoint has lost", in.lost[static_cast<size_t>(c) * n_groups + g], -1, in.p[c] - 1);
        }
    }
}

kv_group & transfer::group_at(int64_t index) {
    return cache_.groups()[static_cast<size_t>(bounded("group", index, 0, static_cast<int64_t>(cache_.groups().size()) - 1))];
}

void transfer::read(int64_t layer, bool v, float * out, uint64_t n_floats) {
    const auto il = static_cast<uint32_t>(bounded("layer", layer, 0, int64_t{cache_.n_layer()} - 1));
    if (!cache_.attends(il)) {
        fail(KVG_INVALID_ARGUMENT, "layer %u doesn't attend: it has a state, and no K and V", il);
    }
    if (const uint32_t owner = cache_.owner_of(il); owner != il) {
        fail(KVG_INVALID_ARGUMENT, "layer %u has no K and V of its own: it reads those of layer %u", il, owner);
    }
    const kv_group & group = cache_.group_of(il);
    if (v && group.spec().v_in_k > 0) {
        fail(KVG_INVALID_ARGUMENT, "layer %u has no V of its own: it is the first %u dimensions of K", il, group.spec().v_in_k);
    }
    const uint32_t width = v ? group.spec().v_width() : group.spec().k_width();
    const uint64_t wanted = uint64_t{group.cells().size()} * width;
    if (!out || n_floats != wanted) {
        fail(KVG_INVALID_ARGUMENT, "the buffer holds %llu floats, expected %llu", (unsigned long long) n_floats,
             (unsigned long long) wanted);
    }
    upkeep_.require_intact();
    if (!v) {
        upkeep_.before_read();
    }
    group.read(il, v, out);
    if (!v) {
        upkeep_.shift(cache_.group_index_of(il)).rotate_floats(il, out);
    }
}

static void require_bytes(uint64_t given, uint64_t wanted, int64_t n_cells) {
    if (given != wanted) {
        fail(KVG_INVALID_ARGUMENT, "%llu bytes of K and V, expected %llu for %lld cells", (unsigned long long) given,
             (unsigned long long) wanted, static_cast<long long>(n_cells));
    }
}

std::vector<uint32_t> transfer::cells_of(const kv_group & group, const int32_t * cells, int64_t n_cells) {
    const int64_t size = group.cells().size();
    std::vector<uint32_t> rows(static_cast<size_t>(bounded("n_cells", n_cells, 0, size)));
    for (size_t i = 0; i < rows.size(); ++i) {
        rows[i] = static_cast<uint32_t>(bounded("cell", cells[i], 0, size - 1));
    }
    return rows;
}

void transfer::read_rows(const kvg_kv_read_request & want) {
    cache_.require_one_type("saving cells");
    const kv_group & group = group_at(want.group);
    const auto n_layers = static_cast<int64_t>(group.layers().size());
    const int64_t begin = bounded("layer_begin", want.layer_begin, 0, n_layers);
    const int64_t end = bounded("layer_end", want.layer_end, begin, n_layers);
    const layer_range range = {static_cast<size_t>(begin), static_cast<size_t>(end)};
    const std::vector<uint32_t> rows = cells_of(group, want.cells, want.n_cells);
    require_bytes(want.n_bytes, rows_bytes(group, range, rows.size()), want.n_cells);
    upkeep_.before_read();
    advise_huge_pages(want.data, want.n_bytes);
    kvg::read_rows(group, range, rows, want.data, n_threads_);
    upkeep_.shift(static_cast<size_t>(want.group)).rotate_copies(rows, range, want.data, want.dither, n_threads_);
}

packed_rows transfer::pack(int64_t g, int64_t layer, const int32_t * cells, int64_t n_cells) {
    cache_.require_one_type("saving cells");
    kv_group & group = group_at(g);
    const auto place = static_cast<size_t>(bounded("layer", layer, 0, static_cast<int64_t>(group.layers().size()) - 1));
    const std::vector<uint32_t> rows = cells_of(group, cells, n_cells);
    upkeep_.before_read();
    const bool waits = std::any_of(rows.begin(), rows.end(), [&](uint32_t cell) { return group.cells().shift(cell) != 0; });
    const bool on_device = packed_rows::is_on_device(group, place) && !waits && !rows.empty();
    packed_rows packed(group, place, static_cast<uint32_t>(rows.size()), on_device);
    if (on_device) {
        packed.gather(group, rows);
        return packed;
    }
    std::vector<uint8_t> dither(rows.size());
    read_rows(
        {sizeof(kvg_kv_read_request), g, layer, layer + 1, cells, n_cells, packed.data(), packed.n_bytes(), dither.data()});
    return packed;
}

// What is packed, and where it goes.
static void check_packed(const kv_group & group, const kvg_kv_rows & in) {
    for (size_t place = 0; in.packed && place < group.layers().size(); ++place) {
        const kvg_packed * packed = in.packed[place];
        if (packed && !packed->rows.fits(group)) {
            fail(KVG_INVALID_ARGUMENT, "the packed rows of layer %u are of another kind", group.layers()[place]);
        }
        for (int64_t i = 0; packed && i < in.n_cells; ++i) {
            bounded("a packed row", in.which[i], 0, int64_t{packed->rows.n_cells()} - 1);
        }
    }
}

void transfer::write(kv_group & group, const kvg_kv_rows & in, const std::vector<uint32_t> & slots) {
    if (!in.packed) {
        write_rows(group, {0, group.layers().size()}, slots, in.data, n_threads_);
        return;
    }
    const std::vector<uint32_t> from(in.which, in.which + in.n_cells);
    for (size_t place = 0; place < group.layers().size(); ++place) {
        const layer_range range = {place, place + 1};
        if (in.packed[place]) {
            in.packed[place]->rows.write(group, place, from, slots);
        } else {
            write_rows(group, range, slots, in.data + rows_bytes(group, {0, place}, slots.size()), n_threads_);
        }
    }
}

std::vector<uint32_t> transfer::check_groups(const kvg_kv_rows * groups, int64_t n_groups) {
    bounded("n_groups", n_groups, static_cast<int64_t>(cache_.groups().size()), static_cast<int64_t>(cache_.groups().size()));
    std::vector<uint32_t> n_cells;
    for (int64_t g = 0; g < n_groups; ++g) {
        n_cells.push_back(static_cast<uint32_t>(bounded("n_cells", groups[g].n_cells, 0, std::numeric_limits<int32_t>::max())));
        const uint64_t wanted = static_cast<uint64_t>(groups[g].n_cells) * group_at(g).cell_bytes();
        require_bytes(groups[g].n_bytes, wanted, groups[g].n_cells);
        check_packed(group_at(g), groups[g]);
    }
    return n_cells;
}

// Until rows are written, everything is done to copies.
void transfer::replace(int64_t seq, const kvg_kv_rows * groups, int64_t n_groups, const kvg_kv_checkpoint_list & checkpoints,
                       const kvg_kv_state_list & states) {
    cache_.require_one_type("loading cells");
    const std::vector<uint32_t> n_cells = check_groups(groups, n_groups);
    upkeep_.require_intact();
    check_checkpoints(seq, cache_.n_seq_max(), cache_.groups().size(), checkpoints);
    std::vector<int64_t> holds(static_cast<size_t>(checkpoints.n));
    std::generate(holds.begin(), holds.end(), [&] { return cache_.new_hold(); });
    loaded_states loaded(cache_, seq, states, checkpoints, holds);
    std::vector<cells> next = cache_.copy_cells();
    for (cells & cells : next) {
        cells.seq_rm(seq, 0, -1);
    }
    std::vector<int64_t> gone;
    if (checkpoints.n == 0) { // else nothing that is there makes way for them
        gone = cache_.making_way(next, n_cells, loaded.n_rows(), seq);
    }
    loaded.reserve(gone);
    cache_.reserve_checkpoints(holds.size());
    std::vector<std::vector<uint32_t>> slots;
    for (size_t g = 0; g < next.size(); ++g) {
        const bool is_told = g > 0 && !next.front().reuses();
        slots.push_back(replace_cells(next[g], seq, groups[g], is_told ? &next.front() : nullptr, [&](cells & cells) {
            put_checkpoints(cells, cache_.groups()[g], g, next.size(), checkpoints, holds);
        }));
    }
    for (kv_group & group : cache_.groups()) {
        group.set_broken(); // rows of cells that are to be replaced may be overwritten
    }
    for (int64_t g = 0; g < n_groups; ++g) {
        kv_group & group = group_at(g);
        write(group, groups[g], slots[static_cast<size_t>(g)]);
        fault_point("load-write");
    }
    for (int64_t g = 0; g < n_groups; ++g) { // nothing fails from here on
        std::swap(group_at(g).cells(), next[static_cast<size_t>(g)]);
        group_at(g).set_whole();
    }
    cache_.drop_those(gone);
    cache_.drop_within(seq, 0, -1);
    cache_.forget_states(seq);
    for (size_t c = 0; c < holds.size(); ++c) {
        cache_.add_checkpoint(checkpoints.seq[c], checkpoints.p[c], holds[c]);
    }
    loaded.commit();
    cache_.settle_states();
}

} // namespace kvg
