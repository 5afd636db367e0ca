#include "memory/defrag_plan.h"

#include <algorithm>
#include <numeric>

namespace kvg {

namespace {

constexpr uint32_t NONE = UINT32_MAX;

uint32_t n_members(const seq_set & set) {
    uint32_t n = 0;
    for (const uint64_t word : set) {
        n += static_cast<uint32_t>(__builtin_popcountll(word));
    }
    return n;
}

// Bits reversed, so that of two sets the one with the lowest id that the other lacks compares greater.
uint64_t reversed(uint64_t word) {
    uint64_t out = 0;
    for (int bit = 0; bit < 64; ++bit) {
        out |= ((word >> bit) & 1) << (63 - bit);
    }
    return out;
}

// Of those cells that may have a content.
uint32_t end_of(const cells & cells, const cell_span & among) { return std::min(cells.n_kv(), among.begin + among.n); }

// What cells are ordered by, largest first; then by position.
struct sort_key {
    uint32_t n_members;
    std::vector<uint64_t> lowest_first;

    bool operator==(const sort_key & o) const { return lowest_first == o.lowest_first; }
    bool operator<(const sort_key & o) const {
        return n_members != o.n_members ? n_members > o.n_members : lowest_first > o.lowest_first;
    }
};

// The used cells that may move, in the order in which they should stand.
std::vector<uint32_t> sorted_cells(const cells & cells, const cell_span & among) {
    std::vector<sort_key> keys(cells.n_kv());
    std::vector<uint32_t> order;
    for (uint32_t i = among.begin; i < end_of(cells, among); ++i) {
        if (cells.is_empty(i) || cells.is_reserved(i)) {
            continue;
        }
        seq_set set = cells.set(i);
        keys[i].n_members = n_members(set);
        std::transform(set.begin(), set.end(), set.begin(), reversed);
        keys[i].lowest_first = std::move(set);
        order.push_back(i);
    }
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
        if (keys[a] == keys[b]) {
            // cells that only holds keep stay in their order: by position, prefixes would be mixed up
            return keys[a].n_members > 0 && cells.pos(a) < cells.pos(b);
        }
        return keys[a] < keys[b];
    });
    return order;
}

// Where each cell of a plan stands while its steps are laid out.
class layout {
public:
    explicit layout(const cells & cells) : place_(cells.n_kv()), occupant_(cells.n_kv(), NONE) {
        std::iota(place_.begin(), place_.end(), 0);
        for (uint32_t i = 0; i < cells.n_kv(); ++i) {
            occupant_[i] = cells.is_empty(i) ? NONE : i;
        }
    }
    uint32_t place(uint32_t cell) const { return place_[cell]; }
    uint32_t occupant(uint32_t place) const { return occupant_[place]; }
    void apply(const std::vector<cell_move> & moves) {
        std::vector<uint32_t> moved;
        for (const cell_move & m : moves) {
            moved.push_back(occupant_[m.src]);
            occupant_[m.src] = NONE;
        }
        for (size_t i = 0; i < moves.size(); ++i) {
            occupant_[moves[i].dst] = moved[i];
            place_[moved[i]] = moves[i].dst;
        }
    }

private:
    std::vector<uint32_t> place_;    // of a cell, by its index in the beginning
    std::vector<uint32_t> occupant_; // of a place
};

// Puts each cell of `targets` on its place there, and sends those who stood there and go nowhere themselves to the places that became
// free.
std::vector<cell_move> sort_step(const layout & now, const std::vector<cell_move> & targets, uint32_t n_places) {
    std::vector<cell_move> moves;
    std::vector<bool> leaves(n_places, false);
    std::vector<bool> filled(n_places, false);
    for (const cell_move & target : targets) {
        moves.push_back({now.place(target.src), target.dst});
        leaves[now.place(target.src)] = true;
        filled[target.dst] = true;
    }
    std::vector<uint32_t> vacated;
    for (const cell_move & m : moves) {
        if (!filled[m.src]) {
            vacated.push_back(m.src);
        }
    }
    std::sort(vacated.begin(), vacated.end());
    size_t next = 0;
    for (const cell_move & target : targets) {
        if (now.occupant(target.dst) != NONE && !leaves[target.dst]) {
            moves.push_back({target.dst, vacated[next++]});
        }
    }
    return moves;
}

// Where cells may be moved from and to: wherever no reserved cell is. n_used: cells there that are not empty.
struct free_places {
    std::vector<uint32_t> places;
    uint32_t n_used = 0;

    free_places(const cells & cells, const cell_span & among) {
        for (uint32_t i = among.begin; i < end_of(cells, among); ++i) {
            if (!cells.is_reserved(i)) {
                places.push_back(i);
                n_used += !cells.is_empty(i);
            }
        }
    }
};

} // namespace

std::vector<cell_move> plan_fill(const cells & cells, const cell_span & among) {
    const free_places found(cells, among);
    std::vector<cell_move> moves;
    size_t src = found.n_used;
    for (size_t dst = 0; dst < found.n_used; ++dst) {
        if (!cells.is_empty(found.places[dst])) {
            continue;
        }
        // as many holes among the first n_used places as used cells beyond them: src stays inside
        while (cells.is_empty(found.places[src])) {
            ++src;
        }
        moves.push_back({found.places[src++], found.places[dst]});
    }
    return moves;
}

std::vector<std::vector<cell_move>> plan_sort(const cells & cells, uint32_t max_ranks, const cell_span & among) {
    const std::vector<uint32_t> order = sorted_cells(cells, among);
    const free_places found(cells, among);
    std::vector<std::vector<cell_move>> steps;
    layout now(cells);
    std::vector<cell_move> targets; // a cell by its index in the beginning, and its place
    for (size_t rank = 0; rank <= order.size(); ++rank) {
        if (rank < order.size() && now.place(order[rank]) != found.places[rank]) {
            targets.push_back({order[rank], found.places[rank]});
        }
        if (targets.size() == max_ranks || (rank == order.size() && !targets.empty())) {
            steps.push_back(sort_step(now, targets, cells.n_kv()));
            now.apply(steps.back());
            targets.clear();
        }
    }
    return steps;
}

} // namespace kvg
