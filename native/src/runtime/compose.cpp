// Composite cells of all groups at once (transfer::compose).
#include <algorithm>
#include <set>

#include "error.h"
#include "memory/compose.h"
#include "runtime/bounded.h"
#include "runtime/transfer.h"

namespace kvg {

// What is to become of one group, checked.
struct composition {
    size_t group; // index in the cache
    std::vector<uint32_t> cells;
    std::vector<uint32_t> kept;     // the lowest of them, which stay
    std::vector<int32_t> positions; // rising, one of each cell
    const int32_t * from;           // as in kvg_kv_composite
};

namespace {

// Checks `in`. those: its cells. precondition: they are within the group
composition check(const kv_group & group, size_t index, uint32_t seq, std::vector<uint32_t> those,
                  const kvg_kv_composite & in) {
    composition found = {index, std::move(those), {}, {}, in.from};
    found.kept = found.cells;
    std::sort(found.kept.begin(), found.kept.end());
    if (std::adjacent_find(found.kept.begin(), found.kept.end()) != found.kept.end()) {
        fail(KVG_INVALID_ARGUMENT, "a cell is given twice");
    }
    for (const uint32_t i : found.kept) {
        if (!group.cells().has_seq(i, seq) || group.cells().is_shared(i)) {
            fail(KVG_INVALID_ARGUMENT, "cell %u isn't sequence %u's alone", i, seq);
        }
        found.positions.push_back(group.cells().pos(i));
    }
    found.kept.resize(static_cast<size_t>(bounded("n_kept", in.n_kept, 1, static_cast<int64_t>(found.kept.size()))));
    std::sort(found.positions.begin(), found.positions.end());
    const std::set<int32_t> gone(found.positions.begin(), found.positions.end());
    const std::vector<uint32_t> all = group.cells().of_seq(seq, 0);
    const auto n_there =
        std::count_if(all.begin(), all.end(), [&](uint32_t i) { return gone.count(group.cells().pos(i)) > 0; });
    if (static_cast<size_t>(n_there) != found.cells.size()) {
        fail(KVG_INVALID_ARGUMENT, "sequence %u has %zu cells at these positions, and %zu are given", seq,
             static_cast<size_t>(n_there), found.cells.size());
    }
    const size_t n_heads = group.layers().size() * group.spec().n_head_kv;
    for (size_t i = 0; i < n_heads * found.kept.size(); ++i) {
        const bool is_first = i % found.kept.size() == 0;
        bounded("from", in.from[i], is_first ? 0 : int64_t{in.from[i - 1]} + 1, in.n_cells - 1);
    }
    return found;
}

// Each position once, but not the last one.
std::vector<int32_t> before_last(std::vector<int32_t> positions) {
    positions.erase(std::unique(positions.begin(), positions.end()), positions.end());
    positions.pop_back();
    return positions;
}

// Tells the cells of a group that those that stay have rows of several tokens, and that the sequence leaves the others.
void tell(cells & cells, const composition & made, uint32_t seq, uint8_t dither) {
    cells.compose(made.kept, seq, made.positions.back(), dither);
    const std::set<uint32_t> kept(made.kept.begin(), made.kept.end());
    for (const uint32_t each : made.cells) {
        if (kept.count(each) == 0) {
            cells.leave(each, seq);
        }
    }
}

} // namespace

std::vector<composition> transfer::check_compositions(uint32_t seq, const kvg_kv_composite * groups, int64_t n_groups) {
    std::vector<size_t> wanted;
    for (size_t g = 0; g < cache_.groups().size(); ++g) {
        if (cache_.groups()[g].spec().window == 0) {
            wanted.push_back(g);
        }
    }
    const auto n = static_cast<int64_t>(wanted.size());
    if (n == 0) {
        fail(KVG_UNSUPPORTED, "every layer of this model has a window or a state: there are no cells to compose");
    }
    bounded("n_groups", n_groups, n, n);
    std::vector<composition> found;
    for (const size_t g : wanted) {
        const kv_group & group = cache_.groups()[g];
        const kvg_kv_composite & in = groups[found.size()];
        bounded("group", in.group, static_cast<int64_t>(g), static_cast<int64_t>(g));
        found.push_back(check(group, g, seq, cells_of(group, in.cells, in.n_cells), in));
        if (found.back().positions != found.front().positions || found.back().kept.size() != found.front().kept.size()) {
            fail(KVG_INVALID_ARGUMENT, "groups differ in the positions that are given, or in n_kept");
        }
    }
    return found;
}

void transfer::compose(int64_t seq, const kvg_kv_composite * groups, int64_t n_groups) {
    cache_.require_one_type("composite cells");
    const auto s = static_cast<uint32_t>(bounded("seq", seq, 0, int64_t{cache_.n_seq_max()} - 1));
    const std::vector<composition> all = check_compositions(s, groups, n_groups);
    std::vector<uint8_t> dithers;
    for (const composition & each : all) {
        dithers.push_back(upkeep_.settle_alike(each.group, each.cells));
    }
    for (const composition & each : all) {
        cache_.groups()[each.group].set_broken(); // until all rows are written
    }
    for (const composition & each : all) {
        compose_rows(cache_.groups()[each.group], each.cells, each.kept, each.from);
    }
    for (size_t i = 0; i < all.size(); ++i) {
        tell(cache_.groups()[all[i].group].cells(), all[i], s, dithers[i]);
    }
    // from the groups with a window, too
    cache_.seq_rm_at(seq, before_last(all.front().positions));
    for (const composition & each : all) {
        cache_.groups()[each.group].set_whole();
    }
}

} // namespace kvg
