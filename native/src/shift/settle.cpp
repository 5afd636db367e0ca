#include "shift/settle.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "fault.h"

namespace kvg {

namespace {

constexpr uint8_t ROTATED_ONCE = 1; // K has no dither after its first rotation, as it had none (0) when it was written

using shift_in_chunk = std::pair<int32_t, uint32_t>;

// How many cells of a chunk have the same shift.
struct alike {
    uint32_t chunk;
    uint32_t n;
};

// Keeps the chunks in which cells may wait: the fullest ones, and as many as the limits in settle.h allow.
void keep_full(std::vector<alike> & chunks) {
    std::stable_sort(chunks.begin(), chunks.end(), [](const alike & a, const alike & b) { return a.n > b.n; });
    size_t kept = 0;
    uint32_t n = 0;
    while (kept < chunks.size() && n + chunks[kept].n >= (kept + 1) * MIN_WAITING_IN_CHUNK) {
        n += chunks[kept++].n;
    }
    chunks.resize(n < MIN_WAITING ? 0 : kept);
}

std::set<shift_in_chunk> where_cells_may_wait(const cells & cells) {
    std::unordered_map<int32_t, std::vector<alike>> all; // by shift; chunks in rising order
    std::pair<const int32_t, std::vector<alike>> * last =
        nullptr; // the entry of the last cell: neighbours mostly have the same shift
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        if (cells.shift(i) == 0) {
            continue;
        }
        if (last == nullptr || last->first != cells.shift(i)) {
            last = &*all.try_emplace(cells.shift(i)).first;
        }
        std::vector<alike> & chunks = last->second;
        if (chunks.empty() || chunks.back().chunk != i / WAITING_CHUNK) {
            chunks.push_back({i / WAITING_CHUNK, 0});
        }
        ++chunks.back().n;
    }
    std::set<shift_in_chunk> out;
    for (auto & [shift, chunks] : all) {
        keep_full(chunks);
        for (const alike & those : chunks) {
            out.emplace(shift, those.chunk);
        }
    }
    return out;
}

// The dither that rows get when they are rotated again. No row carries it now, unless all dithers are in use. The search starts after
// the dither that most rows carry. So most rows go through all dithers in order, whatever dithers a few other rows carry.
uint8_t next_dither(std::array<uint32_t, 256> n_rows) {
    n_rows[0] = n_rows[1] = 0; // 0 (as written) and 1 (rotated once) are not dithers
    const auto after = [](size_t dither) { return dither == 255 ? size_t{2} : std::max<size_t>(dither + 1, 2); };
    const auto most = static_cast<size_t>(std::max_element(n_rows.begin(), n_rows.end()) - n_rows.begin());
    size_t next = after(most);
    while (n_rows[next] != 0 && next != most) {
        next = after(next);
    }
    return static_cast<uint8_t>(next == most ? after(most) : next);
}

// The cell's pending shift; negated when a test's fault asks for the wrong direction.
int32_t shift_of(const cells & cells, uint32_t i) { return fault_active("shift-sign") ? -cells.shift(i) : cells.shift(i); }

// Makes a rotation_list: each rotation is listed once, and rows stay in the order in which they are added.
class rotation_lister {
public:
    void add(uint32_t row, const row_rotation & rotation) {
        const std::pair<int32_t, uint8_t> key = {rotation.by, rotation.from};
        if (list_.rotations.empty() || key != last_key_) {
            const auto [found, is_new] = known_.try_emplace(key, static_cast<uint32_t>(list_.rotations.size()));
            if (is_new) {
                list_.rotations.push_back(rotation);
            }
            last_key_ = key;
            last_ = found->second;
        }
        list_.rows.push_back({row, last_});
    }
    rotation_list take() && { return std::move(list_); }

private:
    std::map<std::pair<int32_t, uint8_t>, uint32_t> known_;
    std::pair<int32_t, uint8_t> last_key_; // of the last row: neighbours mostly have the same rotation
    uint32_t last_ = 0;
    rotation_list list_;
};

// Lists those of these cells whose K-shift is pending. row_of(i): the row number of the i-th of these cells
template <class F> rotation_list rotate_all(const cells & cells, const std::vector<uint32_t> & rotated, F row_of) {
    std::array<uint32_t, 256> n_rows = {}; // by dither
    for (const uint32_t cell : rotated) {
        n_rows[cells.dither(cell)] += cells.shift(cell) != 0;
    }
    const uint8_t next = next_dither(n_rows);
    rotation_lister lister;
    for (size_t i = 0; i < rotated.size(); ++i) {
        const int32_t by = shift_of(cells, rotated[i]);
        const uint8_t from = cells.dither(rotated[i]);
        if (by != 0) {
            lister.add(row_of(i), {by, from, from == 0 ? ROTATED_ONCE : next});
        }
    }
    return std::move(lister).take();
}

} // namespace

settlement settle(const cells & cells, bool can_wait) {
    const std::set<shift_in_chunk> may_wait =
        can_wait && !fault_active("shift-skip") ? where_cells_may_wait(cells) : std::set<shift_in_chunk>{};
    std::vector<uint32_t> rotated;
    rotation_lister waiting;
    shift_in_chunk last = {0, 0}; // of the last shifted cell: neighbours mostly have the same shift
    bool last_waits = false;
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        const shift_in_chunk here = {cells.shift(i), i / WAITING_CHUNK};
        if (here.first == 0) {
            continue;
        }
        if (here != last) {
            last = here;
            last_waits = may_wait.count(here) > 0;
        }
        if (last_waits) {
            waiting.add(i, {-shift_of(cells, i), 0, 0});
        } else {
            rotated.push_back(i);
        }
    }
    return {rotate_all(cells, rotated, [&](size_t i) { return rotated[i]; }), std::move(waiting).take()};
}

static bool has_dither(uint8_t dither) { return dither > ROTATED_ONCE; }

rotation_list settle_plain(const cells & cells, const std::vector<uint32_t> & those) {
    rotation_lister lister;
    for (const uint32_t i : those) {
        if (cells.shift(i) != 0 || has_dither(cells.dither(i))) {
            lister.add(i, {shift_of(cells, i), cells.dither(i), ROTATED_ONCE});
        }
    }
    return std::move(lister).take();
}

rotation_list settle_copies(const cells & cells, const std::vector<uint32_t> & copied) {
    return rotate_all(cells, copied, [](size_t i) { return static_cast<uint32_t>(i); });
}

rotation_list settle_alike(const cells & cells, const std::vector<uint32_t> & those) {
    const auto is_like_first = [&](uint32_t i) {
        const uint8_t dither = cells.dither(i);
        const uint8_t first = cells.dither(those.front());
        return cells.shift(i) == 0 && (dither == first || (!has_dither(dither) && !has_dither(first)));
    };
    return std::all_of(those.begin(), those.end(), is_like_first) ? rotation_list{} : settle_plain(cells, those);
}

} // namespace kvg
