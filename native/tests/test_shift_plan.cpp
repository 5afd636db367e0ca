#include <doctest/doctest.h>

#include "shift/shift_plan.h"

using namespace kvg;

namespace {

using numbers = std::vector<uint32_t>;

// What of a lot lies where, with what is in no span: (begin, n) and rows.
struct lot {
    uint8_t dither;
    numbers spans; // begin, n, begin, n
    numbers rows;
};

void check(const cells & c, uint32_t align, size_t max_spans, const std::vector<lot> & expected, bool by_dither = true) {
    const std::vector<shift_lot> found = plan_shift(c, by_dither, align, max_spans);
    REQUIRE(found.size() == expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
        CHECK(found[i].dither == expected[i].dither);
        numbers spans;
        for (const cell_span & span : found[i].spans) {
            spans.insert(spans.end(), {span.begin, span.n});
        }
        CHECK(spans == expected[i].spans);
        CHECK(found[i].rows == expected[i].rows);
    }
}

// 64 cells of one sequence.
cells full() {
    cells c(64, 1);
    for (uint32_t i = 0; i < 64; ++i) {
        c.put(i, static_cast<int32_t>(i), {1});
    }
    return c;
}

// Those at the given positions wait for a rotation.
cells waiting(const numbers & positions, cells c = full()) {
    for (const uint32_t p : positions) {
        c.apply(c.check_add(0, p, p + 1, 1000));
    }
    return c;
}

} // namespace

TEST_CASE("those that few others wait with are rotated, and those that lie scattered") {
    cells c(1280, 1); // ten chunks
    for (uint32_t i = 0; i < 1280; ++i) {
        c.put(i, 100000 + static_cast<int32_t>(i), {1});
    }
    const auto shift = [&](int64_t cell, int64_t n, int64_t delta) {
        c.apply(c.check_add(0, 100000 + cell, 100000 + cell + n, delta));
    };
    shift(1270, 4, 1000000);
    c.clear_shifts(waiting_cells(c)); // rotated once
    c.apply(c.check_add(0, 1000000, -1, -1000000));
    shift(0, 40, -70000);
    shift(100, 24, -70000);  // 64 in a chunk
    shift(128, 63, -80000);  // 63
    shift(250, 64, -60000);  // 64 in two, 32 for each
    shift(512, 70, 2000000); // 70 in a chunk, which one more doesn't thin out too much, but two do
    for (const int64_t stray : {90, 200, 340}) {
        shift(stray, 1, 2000000);
    }
    for (int64_t i = 640; i < 1152; i += 4) {
        shift(i, 1, i % 8 ? 3000000 : 4000000); // 64 of each in four chunks
        shift(i + 1, 2, 5000000);               // and 256 between them
    }
    numbers expected;
    for (uint32_t i = 0; i < 1280; ++i) {
        const bool is_scattered = (i >= 640 && i < 1152 && i % 4 == 0) || i == 200 || i == 340;
        if (is_scattered || (i >= 128 && i < 191) || (i >= 1270 && i < 1274)) {
            expected.push_back(i);
        }
    }
    const std::vector<uint32_t> rotated = cells_to_rotate(c);
    CHECK(rotated == expected);
    c.clear_shifts(rotated);
    CHECK(c.n_shifted() == 64 + 64 + 71 + 256);
    CHECK(c.shift(128) == 0);
    CHECK(c.dither(128) == 1);
    CHECK(c.dither(1270) == 2);
    CHECK(c.shift(0) == -70000);
    CHECK(c.dither(0) == 0);
    CHECK(cells_to_rotate(c).empty());
    CHECK(waiting_cells(c).size() == c.n_shifted());
}

TEST_CASE("runs of waiting cells, and nothing else") {
    check(waiting({}), 1, 8, {});
    check(waiting({3, 4, 5, 20, 63}), 1, 8, {{0, {3, 3, 20, 1, 63, 1}, {}}});
}

TEST_CASE("spans begin at multiples of the alignment, what comes before goes by rows") {
    check(waiting({14, 15, 16, 17, 40}), 16, 8, {{0, {16, 2}, {14, 15, 40}}});
    check(waiting({32, 33, 50}), 16, 8, {{0, {32, 2}, {50}}});
}

TEST_CASE("the longest runs are spans, what is above the most of them goes by rows") {
    check(waiting({2, 4, 6, 7}), 1, 2, {{0, {6, 2, 2, 1}, {4}}});
    check(waiting({2, 4, 6, 7}), 1, 0, {{0, {}, {6, 7, 2, 4}}});
    check(waiting({14, 15, 16, 32}), 16, 1, {{0, {16, 1}, {14, 15, 32}}});
}

TEST_CASE("cells go with those of the same dither, neighbours or not, unless it doesn't matter") {
    cells c = waiting({0, 1, 2, 3});
    c.clear_shifts(waiting_cells(c));
    c.apply(c.check_add(0, 1000, 1002, 1000));
    c.clear_shifts(waiting_cells(c)); // cells 0 and 1 twice, 2 and 3 once
    c.apply(c.check_add(0, 0, -1, 1000));
    check(c, 1, 8, {{0, {4, 60}, {}}, {1, {2, 2}, {}}, {2, {0, 2}, {}}});
    check(c, 1, 2, {{0, {4, 60}, {}}, {1, {}, {2, 3}}, {2, {0, 2}, {}}});
    check(c, 4, 8, {{0, {4, 60}, {}}, {1, {}, {2, 3}}, {2, {0, 2}, {}}});
    check(c, 1, 8, {{0, {0, 64}, {}}}, false);
}
