#include <doctest/doctest.h>

#include "rotated.h"
#include "shift/settle.h"

using namespace kvg;

TEST_CASE("cells that few others have the same shift as are rotated, and cells that lie scattered; others wait") {
    cells c(1280, 1); // ten chunks
    for (uint32_t i = 0; i < 1280; ++i) {
        c.put(i, 100000 + static_cast<int32_t>(i), {1});
    }
    const auto shift = [&](int64_t cell, int64_t n, int64_t delta) {
        c.apply(c.check_add(0, 100000 + cell, 100000 + cell + n, delta));
    };
    shift(1270, 4, 1000000);
    rotate(c, settle(c, false).rotated); // once
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
    const settlement settled = settle(c, true);
    CHECK(rows_of(settled.rotated) == expected);
    CHECK(settled.waiting.rows.size() == 64 + 64 + 71 + 256);
    for (const rotated_row & row : settled.waiting.rows) { // queries are rotated in the opposite direction
        CHECK(settled.waiting.rotations[row.index].by == -c.shift(row.row));
    }
    for (const rotated_row & row : settled.rotated.rows) {
        CHECK(settled.rotated.rotations[row.index].by == c.shift(row.row));
    }
    rotate(c, settled.rotated);
    CHECK(c.n_shifted() == settled.waiting.rows.size());
    CHECK(c.shift(128) == 0);
    CHECK(c.dither(128) == 1);
    CHECK(c.dither(1270) == 2);
    CHECK(c.shift(0) == -70000);
    CHECK(c.dither(0) == 0);
    CHECK(settle(c, true).rotated.rows.empty());
    CHECK(settle(c, false).rotated.rows.size() == c.n_shifted());
}

TEST_CASE("each rotation is listed once, and each row refers to its own") {
    cells c = full();
    c.apply(c.check_add(0, 60, -1, 7));
    c.apply(c.check_add(0, 0, 2, 1000));
    const rotation_list list = settle(c, false).rotated;
    REQUIRE(list.rotations.size() == 2);
    CHECK(rows_of(list) == numbers{0, 1, 60, 61, 62, 63});
    CHECK(list.rotations[list.rows[1].index].by == 1000);
    CHECK(list.rotations[list.rows[5].index].by == 7);
}

TEST_CASE("copies are rotated as far as their K-shift is pending, in the order in which they lie") {
    cells c = full();
    c.apply(c.check_add(0, 0, -1, 5));
    rotate(c, settle(c, false).rotated);
    c.apply(c.check_add(0, 5 + 10, 5 + 12, 100));
    const rotation_list list = settle_copies(c, {11, 3, 10, 11});
    CHECK(rows_of(list) == numbers{0, 2, 3});
    REQUIRE(list.rotations.size() == 1);
    CHECK(list.rotations[0].by == 100);
    CHECK(list.rotations[0].from == 1);
    CHECK(list.rotations[0].to == 2);
    CHECK(c.shift(11) == 100); // the cell itself stays as it was
}

TEST_CASE("cells that were rotated before are given one new dither, and others none") {
    cells c(8, 1);
    for (uint32_t i = 0; i < 6; ++i) {
        c.put(i, static_cast<int32_t>(i), {1});
    }
    const auto shift = [&](int64_t p0, int64_t p1) { c.apply(c.check_add(0, p0, p1, 10)); };
    const auto rotate_all = [&] { rotate(c, settle(c, false).rotated); };
    shift(2, -1);
    rotate_all();
    CHECK(c.dither(1) == 0);
    CHECK(c.dither(2) == 1);
    c.set_dither(3, 40);
    c.set_dither(5, 200); // which stays where it is
    shift(0, 14);
    c.set_dither(4, 40);
    c.set_dither(2, 41);
    rotate_all(); // after the one that most carry, but none of the others'
    CHECK(c.dither(1) == 1);
    CHECK(c.dither(2) == 42);
    CHECK(c.dither(3) == 42);
    CHECK(c.dither(5) == 200);
    c.set_dither(2, 255);
    c.set_dither(3, 255);
    c.set_dither(4, 2);
    shift(0, -1);
    rotate_all();
    CHECK(c.dither(2) == 3); // round about
    c.check();
}
