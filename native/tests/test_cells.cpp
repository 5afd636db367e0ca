#include <doctest/doctest.h>

#include <cstdint>
#include <limits>

#include "error.h"
#include "memory/cells.h"

using namespace kvg;

namespace {

seq_set set_of(const cells & cells, std::initializer_list<uint32_t> members) {
    seq_set set = cells.make_set();
    for (const uint32_t s : members) {
        set[s / 64] |= uint64_t{1} << (s % 64);
    }
    return set;
}

// Sequence 0 at positions 0 .. n - 1 in cells 0 .. n - 1.
cells filled(uint32_t n_cells, uint32_t n, uint32_t n_seq_max = 4) {
    cells c(n_cells, n_seq_max);
    for (uint32_t i = 0; i < n; ++i) {
        c.put(i, static_cast<int32_t>(i), set_of(c, {0}));
    }
    return c;
}

// What a context does with cells that nobody shares.
void add(cells & c, int64_t seq, int64_t p0, int64_t p1, int64_t delta) { c.apply(c.check_add(seq, p0, p1, delta)); }
void div(cells & c, int64_t seq, int64_t p0, int64_t p1, int64_t d) { c.apply(c.check_div(seq, p0, p1, d)); }

template <class F> kvg_status status_of(F call) {
    try {
        call();
    } catch (const error & e) {
        return e.status();
    }
    return KVG_OK;
}

} // namespace

TEST_CASE("an empty cache has nothing in it") {
    const cells c(8, 4);
    CHECK(c.n_used() == 0);
    CHECK(c.n_kv() == 0);
    CHECK(c.seq_pos_max(0) == -1);
    CHECK(c.seq_pos_min(3) == -1);
    CHECK_NOTHROW(c.check());
}

TEST_CASE("seq_rm leaves holes, and n_kv falls when the tail goes") {
    cells c = filled(16, 10);
    c.seq_rm(0, 2, 5);
    CHECK(c.n_used() == 7);
    CHECK(c.n_kv() == 10);
    CHECK(c.is_empty(3));
    c.seq_rm(0, 8, -1);
    CHECK(c.n_kv() == 8);
    CHECK(c.seq_pos_max(0) == 7);
    c.seq_rm(-1, -5, -1);
    CHECK(c.n_used() == 0);
    CHECK(c.n_kv() == 0);
    c.check();
}

TEST_CASE("first and last position, count and span of a sequence follow every change at its ends") {
    cells c = filled(32, 10, 200);
    const auto span = [&](uint32_t seq, int32_t lowest = 0) { return c.span_from(seq, lowest); };
    c.put(20, 3, set_of(c, {199}));
    c.put(25, 1, set_of(c, {199}));
    CHECK(c.seq_pos_min(199) == 1); // in the higher cell
    CHECK(c.seq_pos_max(199) == 3);
    CHECK(c.extent(199).n == 2);
    CHECK(span(199).begin == 20);
    CHECK(span(199).n == 6);
    CHECK(span(199, 2).n == 1);
    CHECK(span(199, 4).n == 0);
    CHECK(span(0, 4).begin == 4);
    CHECK(span(0, 4).n == 6);
    c.put(10, 10, set_of(c, {0}));
    CHECK(span(0, 9).begin == 9);
    CHECK(span(0, 9).n == 2);
    c.seq_rm(0, 10, -1);
    CHECK(span(0, 9).n == 1);
    CHECK(span(7).n == 0);
    c.seq_rm(0, 8, -1);
    c.seq_rm(0, 0, 3);
    c.seq_rm(199, 3, 4);
    c.check();
    CHECK(c.seq_pos_min(0) == 3);
    CHECK(c.seq_pos_max(0) == 7);
    CHECK(c.extent(0).n == 5);
    CHECK(span(0).begin == 3);
    CHECK(span(0).n == 5);
    CHECK(span(199).begin == 25);
    CHECK(span(199).n == 1);
    c.check();
    c.move({{25, 1}, {7, 2}});
    CHECK(span(199).begin == 1);
    CHECK(span(0).n == 5); // 2 to 6
    add(c, 0, 6, -1, -6);  // cells 6 and 2, now at 0 and 1
    CHECK(c.seq_pos_min(0) == 0);
    CHECK(c.seq_pos_max(0) == 5);
    add(c, 0, 0, 2, -2);
    CHECK(c.seq_pos_min(0) == 3);
    CHECK(c.extent(0).n == 3);
    c.check();
    c.put(2, 9, set_of(c, {0, 199})); // an end that is added to while it may be further in
    c.seq_rm(0, 9, -1);
    c.put(6, 8, set_of(c, {0}));
    c.check();
    CHECK(c.seq_pos_max(0) == 8);
    CHECK(c.seq_pos_max(199) == 9);
    c.seq_rm(-1, 0, -1);
    CHECK(c.extent(0).n == 0);
    CHECK(c.seq_pos_max(0) == -1);
    CHECK(c.seq_pos_min(0) == -1);
    c.check();
}

TEST_CASE("what a token sees is known without a look at the cells when they are one run of its one sequence") {
    cells c = filled(32, 10, 200);
    const auto n = [&](std::initializer_list<uint32_t> members, int32_t pos, int32_t lowest = 0) {
        return c.seen_run(set_of(c, members), lowest, pos).n;
    };
    CHECK(n({0}, 10) == 10);
    CHECK(n({0}, 9) == 10);
    CHECK(n({0}, 8) == 0);
    CHECK(n({0}, 10, 1) == 0);
    CHECK(n({1}, 8) == 0);
    CHECK(n({0, 1}, 10) == 0);
    c.seq_cp(0, 199, 4, 6); // a sharer hides nothing
    CHECK(n({0}, 10) == 10);
    CHECK(n({199}, 10) == 2);
    CHECK(c.seen_run(set_of(c, {199}), 3, 10).begin == 4);
    c.seq_rm(0, 5, 6);
    CHECK(n({0}, 10) == 0);
    c.seq_rm(0, 4, -1);
    CHECK(n({0}, 10) == 4);
}

TEST_CASE("a shared cell stays until its last sequence goes") {
    cells c = filled(8, 4);
    c.seq_cp(0, 2, 1, 3);
    c.seq_rm(0, 0, -1);
    CHECK(c.n_used() == 2);
    CHECK(c.seq_pos_min(2) == 1);
    CHECK(c.seq_pos_max(2) == 2);
    c.seq_keep(1);
    CHECK(c.n_used() == 0);
    c.check();
}

TEST_CASE("sequences beyond the first word of the set") {
    cells c = filled(4, 4, 200);
    c.seq_cp(0, 199, 0, -1);
    c.seq_cp(0, 64, 0, 1);
    CHECK(c.has_seq(3, 199));
    CHECK(c.shared_in(c.check_add(199, 0, -1, 1)) == std::vector<uint32_t>{0, 1, 2, 3});
    c.seq_keep(199);
    CHECK_FALSE(c.has_seq(0, 0));
    CHECK_FALSE(c.has_seq(0, 64));
    add(c, 199, 0, -1, 1);
    CHECK(c.seq_pos_max(199) == 4);
    c.check();
}

TEST_CASE("shift is new minus old, added up") {
    cells c = filled(16, 12);
    add(c, 0, 8, -1, -4);
    CHECK(c.pos(8) == 4);
    CHECK(c.shift(8) == -4);
    div(c, 0, 4, 8, 2); // cells 4 .. 11, which are at 4 .. 7 now
    CHECK(c.pos(11) == 3);
    CHECK(c.shift(11) == 3 - 11);
    CHECK(c.pos(4) == 2);
    CHECK(c.shift(4) == 2 - 4);
    CHECK(c.n_shifted() == 8);
    add(c, 0, 2, 3, 2); // back to where they were: nothing is pending there
    CHECK(c.shift(4) == 0);
    for (const uint32_t i : {2, 5, 6, 7, 8, 9, 10, 11}) {
        c.set_rotated(i, 1);
    }
    CHECK(c.dither(11) == 1);
    CHECK(c.n_shifted() == 0);
    CHECK(c.pos(11) == 3);
    c.check();
}

TEST_CASE("a position below 0 takes the cell from the sequence") {
    cells c = filled(8, 6);
    c.seq_cp(0, 1, 0, 2);
    add(c, 0, 0, -1, -2); // shared cells 0 and 1 fall off sequence 0 only
    CHECK(c.n_used() == 6);
    CHECK_FALSE(c.has_seq(0, 0));
    CHECK(c.has_seq(0, 1));
    CHECK(c.pos(0) == 0);
    CHECK(c.shift(0) == 0);
    CHECK(c.pos(5) == 3);
    add(c, 0, 0, -1, std::numeric_limits<int64_t>::min());
    CHECK(c.seq_pos_max(0) == -1);
    CHECK(c.n_used() == 2);
    c.check();
}

TEST_CASE("what can't be done changes nothing") {
    cells c = filled(8, 6);
    c.seq_cp(0, 1, 5, 6);
    CHECK(status_of([&] { add(c, 0, 0, 5, std::numeric_limits<int32_t>::max()); }) == KVG_INVALID_ARGUMENT);
    CHECK(status_of([&] { add(c, 0, 0, 5, std::numeric_limits<int64_t>::max()); }) == KVG_INVALID_ARGUMENT);
    CHECK(status_of([&] { div(c, 0, 0, -1, 0); }) == KVG_INVALID_ARGUMENT);
    CHECK(status_of([&] { div(c, 0, 0, -1, -3); }) == KVG_INVALID_ARGUMENT);
    for (const int64_t seq :
         {int64_t{4}, int64_t{-1}, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
        CHECK(status_of([&] { add(c, seq, 0, -1, 1); }) == KVG_INVALID_ARGUMENT);
        CHECK(status_of([&] { c.seq_cp(0, seq, 0, -1); }) == KVG_INVALID_ARGUMENT);
        CHECK(status_of([&] { c.seq_keep(seq); }) == KVG_INVALID_ARGUMENT);
        CHECK(status_of([&] { c.seq_pos_max(seq); }) == KVG_INVALID_ARGUMENT);
    }
    CHECK(c.n_shifted() == 0);
    for (uint32_t i = 0; i < 6; ++i) {
        CHECK(c.pos(i) == static_cast<int32_t>(i));
    }
    c.check();
}

TEST_CASE("only shared cells that change their position need a copy") {
    cells c = filled(16, 6);
    c.seq_cp(0, 1, 0, 4);
    CHECK(c.shared_in(c.check_add(0, 0, -1, 0)).empty());
    CHECK(c.shared_in(c.check_div(0, 0, -1, 1)).empty());
    CHECK(c.shared_in(c.check_div(0, 0, -1, 2)) == std::vector<uint32_t>{1, 2, 3}); // 0 / 2 is 0
    CHECK(c.shared_in(c.check_add(0, 0, -1, -2)) == std::vector<uint32_t>{2, 3});   // 0 and 1 only leave the sequence
    CHECK(c.shared_in(c.check_add(1, 2, 3, 5)) == std::vector<uint32_t>{2});
}

TEST_CASE("a fork takes position, pending shift and dither, and leaves the other sharers as they were") {
    cells c = filled(8, 4);
    add(c, 0, 2, -1, 10);
    c.set_dither(3, 9);
    c.seq_cp(0, 1, 0, -1);
    c.fork(3, 6, 1);
    CHECK(c.pos(6) == 13);
    CHECK(c.shift(6) == 10);
    CHECK(c.dither(6) == 9);
    CHECK(c.has_seq(6, 1));
    CHECK_FALSE(c.has_seq(6, 0));
    CHECK(c.has_seq(3, 0));
    CHECK_FALSE(c.has_seq(3, 1));
    CHECK(c.n_used() == 5);
    c.check();
}

TEST_CASE("what was ever used is known until clear") {
    cells c = filled(8, 4);
    c.seq_rm(0, 1, -1);
    CHECK(c.n_kv() == 1);
    CHECK(c.n_touched() == 4);
    c.touch(6);
    c.touch(2);
    CHECK(c.n_touched() == 7);
    c.clear();
    CHECK(c.n_touched() == 0);
}

TEST_CASE("move carries position, sequences, pending shift and dither") {
    cells c = filled(8, 6);
    c.seq_cp(0, 3, 5, 6);
    c.seq_rm(0, 0, 1);
    add(c, 0, 4, 5, 10);
    c.set_dither(4, 9);
    c.move({{5, 0}, {4, 7}});
    CHECK(c.dither(0) == 0);
    CHECK(c.dither(7) == 9);
    c.check(); // 4 has none any more
    CHECK(c.pos(0) == 5);
    CHECK(c.has_seq(0, 3));
    CHECK(c.shift(7) == 10);
    CHECK(c.is_empty(4));
    CHECK(c.n_kv() == 8);
    CHECK(c.n_shifted() == 1);
    c.move({{1, 2}, {2, 3}, {3, 1}}); // a cycle
    CHECK(c.pos(2) == 1);
    CHECK(c.pos(3) == 2);
    CHECK(c.pos(1) == 3);
    c.check();
}

TEST_CASE("held cells stay when no sequence sees them, and another sequence gets them back") {
    cells c = filled(16, 8);
    const hold_range first = c.hold(1, 0, -1, 4);
    const hold_range rest = c.hold(2, 0, 4, -1);
    CHECK(first.p0 == 0);
    CHECK(rest.p1 == 8);
    CHECK(status_of([&] { c.attach(rest.id, 1); }) == KVG_INVALID_ARGUMENT);
    c.seq_rm(-1, 0, -1);
    c.check();
    CHECK(c.n_used() == 8);
    CHECK(c.extent(0).n == 0);
    c.attach(first.id, 1);
    c.attach(rest.id, 1);
    CHECK(c.seq_pos_max(1) == 7);
    CHECK(c.extent(1).n == 8);
    CHECK(c.is_shared(0));
    c.check();
    c.release(first.id);
    CHECK_FALSE(c.is_shared(0));
    CHECK(status_of([&] { c.release(first.id); }) == KVG_INVALID_ARGUMENT);
    c.seq_keep(3);
    CHECK(c.n_used() == 4);
    c.check();
    c.release(rest.id);
    CHECK(c.n_used() == 0);
    c.check();
}

TEST_CASE("a range with a gap can't be held, one with two cells at a position can") {
    cells c = filled(16, 8);
    c.seq_rm(0, 3, 4);
    CHECK(status_of([&] { c.hold(3, 0, 0, -1); }) == KVG_INVALID_ARGUMENT);
    CHECK(status_of([&] { c.hold(3, 0, 3, 5); }) == KVG_INVALID_ARGUMENT);
    CHECK(status_of([&] { c.hold(3, 0, 4, 9); }) == KVG_INVALID_ARGUMENT); // beyond the end
    CHECK(status_of([&] { c.hold(3, 0, 5, 5); }) == KVG_INVALID_ARGUMENT);
    CHECK(status_of([&] { c.hold(3, 1, 0, -1); }) == KVG_INVALID_ARGUMENT);
    CHECK(status_of([&] { c.hold(3, 4, 0, 1); }) == KVG_INVALID_ARGUMENT);
    CHECK(c.hold(3, 0, 4, -1).p0 == 4);
    div(c, 0, 0, 3, 2); // positions 0, 0, 1
    const hold_range twice = c.hold(4, 0, 0, 2);
    c.seq_rm(0, 0, -1);
    CHECK(c.n_used() == 7);
    c.attach(twice.id, 2);
    CHECK(c.extent(2).n == 3);
    c.check();
}

TEST_CASE("holds follow their cells when these move, cycles too, and count for copy on write") {
    cells c = filled(8, 6);
    const hold_range held = c.hold(1, 0, 1, 4);
    c.seq_rm(0, 5, -1);
    c.move({{1, 2}, {2, 7}, {3, 1}, {4, 5}});
    c.check();
    CHECK(c.n_holds(7) == 1);
    CHECK(c.n_holds(3) == 0);
    CHECK(c.n_holds(5) == 0);
    CHECK(c.shared_in(c.check_add(0, 0, -1, 2)) == std::vector<uint32_t>{1, 2, 7});
    c.fork(2, 3, 0);
    CHECK(c.n_holds(3) == 0);
    c.seq_rm(0, 0, -1);
    CHECK(c.n_used() == 3);
    c.check();
    for (const uint32_t i : {0u, 3u, 4u, 5u, 6u}) {
        CHECK(c.is_empty(i)); // as new cells' places, whose ids went round
        c.put(i, 50, set_of(c, {2}));
    }
    c.check();
    c.release(held.id);
    CHECK(c.n_used() == 5);
    c.clear();
    CHECK(status_of([&] { c.attach(held.id, 0); }) == KVG_INVALID_ARGUMENT);
    c.check();
}

TEST_CASE("a sequence's order is kept while it grows, and found again after other changes") {
    cells c = filled(32, 4);
    const auto holds = [&](int64_t p0, int64_t p1) { return status_of([&] { c.release(c.hold(1, 0, p0, p1).id); }) == KVG_OK; };
    CHECK(holds(0, 4));
    c.put(10, 4, set_of(c, {0, 1}));
    CHECK(holds(2, 5));
    c.check();
    c.seq_rm(0, 4, 5);
    CHECK_FALSE(holds(2, 5));
    c.put(9, 4, set_of(c, {0}));
    CHECK(holds(2, 5));
    add(c, 0, 4, 5, 1);
    CHECK_FALSE(holds(2, 5));
    c.check();
    c.put(4, 2, set_of(c, {3}));
    c.seq_cp(3, 0, 0, -1); // a second cell at a position before the end
    CHECK(holds(1, 3));
    c.check();
}
