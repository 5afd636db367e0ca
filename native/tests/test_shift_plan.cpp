#include <doctest/doctest.h>

#include <algorithm>
#include <limits>

#include "cache/shift_plan.h"

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

// The frame is the chosen one, and K has followed.
void rotate(cells & c, uint32_t room) {
    const int32_t frame = choose_frame(c, {}, room);
    if (frame != 0) {
        for (const uint32_t i : turned_by_frame(c, frame)) {
            c.set_original(i, i);
        }
    }
    c.set_frame(frame);
    c.clear_shifts();
    c.check();
}

// Positions [n_keep, n_keep + n) are given up, and those after them move down.
void slide(cells & c, int64_t n_keep, int64_t n) {
    c.seq_rm(0, n_keep, n_keep + n);
    c.apply(c.check_add(0, n_keep + n, -1, -n));
}

} // namespace

TEST_CASE("a frame spares the cells that move, when those that stay are fewer and have room") {
    cells c = full();
    CHECK(choose_frame(c, {}, 64) == 0);
    slide(c, 4, 6);
    CHECK(choose_frame(c, {}, 3) == 0);
    CHECK(choose_frame(c, {}, 4) == 6);
    CHECK(turned_by_frame(c, 6) == numbers{0, 1, 2, 3});
    CHECK(turned_by_frame(c, 0).empty());
    rotate(c, 4);
    CHECK(c.frame() == 6);
    CHECK(choose_frame(c, {}, 0) == 6); // nothing waits
    slide(c, 4, 2);
    CHECK(turned_by_frame(c, 8).empty()); // their originals are kept
    CHECK(choose_frame(c, {}, 0) == 8);
    rotate(c, 0);
    slide(c, 30, 2); // 30 stay, 24 move
    CHECK(choose_frame(c, {}, 64) == 8);
    c.seq_rm(0, 0, -1);
    CHECK(choose_frame(c, {}, 64) == 0); // no K, no frame
}

TEST_CASE("a neighbour that doesn't move counts among those that stay") {
    cells c(64, 2);
    for (uint32_t i = 0; i < 64; ++i) {
        c.put(i, static_cast<int32_t>(i / 2), {1u + i % 2});
    }
    slide(c, 2, 5);
    CHECK(c.n_shifted() == 25);
    CHECK(choose_frame(c, {}, 64) == 0);
    c.seq_rm(1, 20, -1); // 20 of it and 2 kept ones are less
    CHECK(choose_frame(c, {}, 64) == 5);
}

TEST_CASE("a frame is near 0, and no position leaves the range of positions in it") {
    constexpr int32_t last = std::numeric_limits<int32_t>::max();
    cells c = full();
    c.apply(c.check_add(0, 0, -1, 8192));
    CHECK(choose_frame(c, {}, 0) == -8192);
    CHECK(choose_frame(c, {8191, 9000}, 0) == 0); // which would be at -1
    c.apply(c.check_add(0, 0, -1, 1));
    CHECK(choose_frame(c, {}, 0) == 0);
    rotate(c, 0);
    c.apply(c.check_add(0, 0, -1, -5));
    rotate(c, 0);
    CHECK(c.frame() == 5);
    CHECK(choose_frame(c, {9000, last - 5}, 0) == 5);
    CHECK(choose_frame(c, {9000, last - 4}, 0) == 0);
    c.apply(c.check_add(0, 0, -1, -8188));
    CHECK(choose_frame(c, {}, 0) == 0); // 8193 would be too far: once all are rotated, and it begins again
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
    c.clear_shifts();
    c.apply(c.check_add(0, 1000, 1002, 1000));
    c.clear_shifts(); // cells 0 and 1 twice, 2 and 3 once
    c.apply(c.check_add(0, 0, -1, 1000));
    check(c, 1, 8, {{0, {4, 60}, {}}, {1, {2, 2}, {}}, {2, {0, 2}, {}}});
    check(c, 1, 2, {{0, {4, 60}, {}}, {1, {}, {2, 3}}, {2, {0, 2}, {}}});
    check(c, 4, 8, {{0, {4, 60}, {}}, {1, {}, {2, 3}}, {2, {0, 2}, {}}});
    check(c, 1, 8, {{0, {0, 64}, {}}}, false);
}
