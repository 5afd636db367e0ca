#include "memory/cell_order.h"

#include <algorithm>
#include <map>

namespace kvg {

namespace {

// Whether each sequence's positions rise over the cells that come.
class rising {
public:
    rising(const cells & cells, const seq_set & seqs) : cells_(cells), seqs_(seqs), last_(cells.n_seq_max(), -1) {}

    bool take(uint32_t cell) {
        const int32_t pos = cells_.pos(cell);
        bool rises = true;
        for (uint32_t w = 0; w < cells_.n_words(); ++w) {
            for (uint64_t bits = cells_.words(cell)[w] & seqs_[w]; bits; bits &= bits - 1) {
                int32_t & last = last_[w * 64 + static_cast<uint32_t>(__builtin_ctzll(bits))];
                rises = rises && pos >= last;
                last = pos;
            }
        }
        return rises;
    }

private:
    const cells & cells_;
    const seq_set & seqs_;
    std::vector<int32_t> last_; // of each sequence
};

// Cells of the same sequences, by their lowest position.
struct group {
    int32_t first;
    std::vector<uint32_t> members;
};

std::vector<group> by_sequences(const cells & cells, const seq_set & seqs, const std::vector<uint32_t> & seen) {
    std::map<seq_set, size_t> places;
    std::vector<group> groups;
    seq_set last;
    size_t place = 0;
    for (const uint32_t c : seen) {
        seq_set set = cells.set(c);
        for (size_t w = 0; w < set.size(); ++w) {
            set[w] &= seqs[w];
        }
        if (set != last) {
            place = places.emplace(set, groups.size()).first->second;
            last = set;
        }
        if (place == groups.size()) {
            groups.push_back({cells.pos(c), {}});
        }
        groups[place].first = std::min(groups[place].first, cells.pos(c));
        groups[place].members.push_back(c);
    }
    std::stable_sort(groups.begin(), groups.end(), [](const group & a, const group & b) { return a.first < b.first; });
    return groups;
}

void sort_by_position(const cells & cells, std::vector<uint32_t> & some) {
    std::stable_sort(some.begin(), some.end(), [&](uint32_t a, uint32_t b) { return cells.pos(a) < cells.pos(b); });
}

bool all_rise(const cells & cells, const seq_set & seqs, const std::vector<uint32_t> & some) {
    rising check(cells, seqs);
    return std::all_of(some.begin(), some.end(), [&](uint32_t c) { return check.take(c); });
}

} // namespace

cell_order rising_order(const cells & cells, const seq_set & seqs, const cell_span & span) {
    const uint32_t end = std::min(span.begin + span.n, cells.n_kv());
    rising check(cells, seqs);
    uint32_t c = span.begin;
    while (c < end && check.take(c)) {
        ++c;
    }
    if (c >= end) {
        return {};
    }
    cell_order seen, others;
    for (c = span.begin; c < span.begin + span.n; ++c) {
        (c < end && cells.meets(c, seqs) ? seen : others).push_back(c);
    }
    cell_order order;
    for (group & each : by_sequences(cells, seqs, seen)) {
        sort_by_position(cells, each.members);
        order.insert(order.end(), each.members.begin(), each.members.end());
    }
    if (!all_rise(cells, seqs, order)) { // a sequence has cells of others in its middle
        order = std::move(seen);
        sort_by_position(cells, order);
    }
    order.insert(order.end(), others.begin(), others.end());
    for (uint32_t & each : order) {
        each -= span.begin;
    }
    return order;
}

} // namespace kvg
