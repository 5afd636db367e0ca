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

using shift_in_chunk = std::pair<int32_t, uint32_t>;

// How many cells of a chunk have the same shift.
struct alike {
    uint32_t chunk;
    uint32_t n;
};

// Keeps the chunks in which cells may wait: as many as there can be, the fullest first.
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
    std::unordered_map<int32_t, std::vector<alike>> all;           // by shift, in order of chunks
    std::pair<const int32_t, std::vector<alike>> * last = nullptr; // neighbours are mostly alike: one lookup for all of them
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

// What rows with a dither carry when they are rotated again: none of them carries it now, unless all dithers are in use. It comes after
// the one that most of them carry: that goes through all of them, whatever a few others bring along.
uint8_t next_dither(std::array<uint32_t, 256> n_rows) {
    n_rows[0] = n_rows[1] = 0; // as it was written, and rotated once: neither is one
    const auto after = [](size_t dither) { return dither == 255 ? size_t{2} : std::max<size_t>(dither + 1, 2); };
    const auto most = static_cast<size_t>(std::max_element(n_rows.begin(), n_rows.end()) - n_rows.begin());
    size_t next = after(most);
    while (n_rows[next] != 0 && next != most) {
        next = after(next);
    }
    return static_cast<uint8_t>(next == most ? after(most) : next);
}

// By how much K owes to turn, unless a fault for tests has it turn the other way.
int32_t turn_of(const cells & cells, uint32_t i) { return fault_active("shift-sign") ? -cells.shift(i) : cells.shift(i); }

// Rows by the turns that they take, in the order in which they are added.
class turn_lister {
public:
    void add(uint32_t row, const turn & turn) {
        const std::pair<int32_t, uint8_t> key = {turn.by, turn.from};
        if (list_.turns.empty() || key != last_key_) {
            const auto [found, is_new] = known_.try_emplace(key, static_cast<uint32_t>(list_.turns.size()));
            if (is_new) { // most turn alike
                list_.turns.push_back(turn);
            }
            last_key_ = key;
            last_ = found->second;
        }
        list_.rows.push_back({row, last_});
    }
    turn_list take() && { return std::move(list_); }

private:
    std::map<std::pair<int32_t, uint8_t>, uint32_t> known_;
    std::pair<int32_t, uint8_t> last_key_; // neighbours mostly turn alike: one lookup for all of them
    uint32_t last_ = 0;
    turn_list list_;
};

// K of these cells rotated, as far as it is pending. row_of(i): where the i-th of them lies
template <class F> turn_list rotate_all(const cells & cells, const std::vector<uint32_t> & rotated, F row_of) {
    std::array<uint32_t, 256> n_rows = {}; // by dither
    for (const uint32_t cell : rotated) {
        n_rows[cells.dither(cell)] += cells.shift(cell) != 0;
    }
    const uint8_t next = next_dither(n_rows);
    turn_lister lister;
    for (size_t i = 0; i < rotated.size(); ++i) {
        const int32_t by = turn_of(cells, rotated[i]);
        const uint8_t from = cells.dither(rotated[i]);
        if (by != 0) {
            lister.add(row_of(i), {by, from, from == 0 ? uint8_t{1} : next});
        }
    }
    return std::move(lister).take();
}

} // namespace

settlement settle(const cells & cells, bool can_wait) {
    const std::set<shift_in_chunk> may_wait =
        can_wait && !fault_active("shift-skip") ? where_cells_may_wait(cells) : std::set<shift_in_chunk>{};
    std::vector<uint32_t> rotated;
    turn_lister waiting;
    shift_in_chunk last = {0, 0}; // neighbours mostly have the same shift: one lookup for all of them
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
            waiting.add(i, {-turn_of(cells, i), 0, 0});
        } else {
            rotated.push_back(i);
        }
    }
    return {rotate_all(cells, rotated, [&](size_t i) { return rotated[i]; }), std::move(waiting).take()};
}

turn_list settle_copies(const cells & cells, const std::vector<uint32_t> & copied) {
    return rotate_all(cells, copied, [](size_t i) { return static_cast<uint32_t>(i); });
}

} // namespace kvg
