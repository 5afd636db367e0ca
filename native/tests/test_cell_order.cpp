#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "memory/cell_order.h"

using namespace kvg;

namespace {

seq_set set_of(std::initializer_list<uint32_t> members) {
    seq_set set(1);
    for (const uint32_t each : members) {
        set[0] |= uint64_t{1} << each;
    }
    return set;
}

// Columns of the sequence's cells, in the order that was found.
std::vector<uint32_t> columns_of(const cells & cells, uint32_t seq, const cell_order & order, const cell_span & span) {
    std::vector<uint32_t> found;
    for (uint32_t i = 0; i < span.n; ++i) {
        const uint32_t c = span.begin + (order.empty() ? i : order[i]);
        if (c < cells.size() && cells.has_seq(c, seq)) {
            found.push_back(c);
        }
    }
    return found;
}

} // namespace

TEST_CASE("cells that lie in order stay where they are, whoever shares them, with gaps and cells of others") {
    cells cells(64, 4);
    for (uint32_t i = 0; i < 40; ++i) {
        cells.put(i, static_cast<int32_t>(i), i < 20 ? set_of({0, 1}) : set_of({i % 2}));
    }
    cells.put(45, 3, set_of({3})); // in another order, but nobody asks
    cells.put(46, 2, set_of({3}));
    CHECK(rising_order(cells, set_of({0, 1}), {0, 64}).empty());
    CHECK_FALSE(rising_order(cells, set_of({0, 3}), {0, 64}).empty());
    CHECK(rising_order(cells, set_of({0, 3}), {0, 46}).empty());
}

TEST_CASE("texts that begin alike: what they share, then each by itself") {
    cells cells(16, 3);
    const std::pair<int32_t, seq_set> put[] = {{4, set_of({0})}, {5, set_of({0})}, {0, set_of({0, 1})}, {1, set_of({0, 1})},
                                               {2, set_of({1})}, {2, set_of({0})}, {3, set_of({0})},    {3, set_of({1})}};
    for (uint32_t i = 0; i < 8; ++i) {
        cells.put(i, put[i].first, put[i].second);
    }
    CHECK(rising_order(cells, set_of({0, 1}), {0, 16}) == cell_order{2, 3, 5, 6, 0, 1, 4, 7, 8, 9, 10, 11, 12, 13, 14, 15});
    CHECK(rising_order(cells, set_of({0}), {0, 8}) == cell_order{2, 3, 5, 6, 0, 1, 4, 7});
}

TEST_CASE("in any order that is found positions rise, and each cell is there once") {
    std::mt19937 random(3);
    uint32_t n_found = 0;
    for (int round = 0; round < 300; ++round) {
        const uint32_t n = 1 + random() % 90;
        cells cells(n, 5);
        for (uint32_t c = 0; c < n; ++c) {
            if (random() % 4 != 0) {
                cells.put(c, static_cast<int32_t>(random() % (round % 2 == 0 ? 30 : 1000)), {1 + random() % 31});
            }
        }
        const uint32_t begin = random() % n;
        const cell_span span = {begin, n - begin + random() % 8}; // to a multiple behind the last one
        const seq_set asked = {1 + random() % 31};
        const cell_order order = rising_order(cells, asked, span);
        n_found += !order.empty();
        cell_order sorted = order;
        std::sort(sorted.begin(), sorted.end());
        for (uint32_t i = 0; i < sorted.size(); ++i) {
            REQUIRE(sorted[i] == i);
        }
        for (uint32_t seq = 0; seq < 5; ++seq) {
            if (asked[0] >> seq & 1) {
                const std::vector<uint32_t> columns = columns_of(cells, seq, order, span);
                CHECK(std::is_sorted(columns.begin(), columns.end(),
                                     [&](uint32_t a, uint32_t b) { return cells.pos(a) < cells.pos(b); }));
            }
        }
    }
    CHECK(n_found > 200);
}
