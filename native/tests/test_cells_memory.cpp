// Cells while the host has no memory: what may not fail half way.
#include <doctest/doctest.h>

#include <cstdint>

#include "memory/cells.h"
#include "scarce_memory.h"

using namespace kvg;

namespace {

// Six cells of sequence 0; sequence 1 sees them too.
cells six() {
    cells c(8, 4);
    for (uint32_t i = 0; i < 6; ++i) {
        c.put(i, static_cast<int32_t>(i), {0b11});
    }
    return c;
}

} // namespace

TEST_CASE("a move that gets no memory has changed nothing") {
    const std::vector<cell_move> moves = {{1, 2}, {2, 3}, {3, 1}, {5, 7}};
    cells c = six();
    int64_t n = 0;
    while (!done_with(n, [&] { c.move(moves); })) {
        for (uint32_t i = 0; i < 6; ++i) {
            CHECK(c.pos(i) == static_cast<int32_t>(i));
            CHECK(c.has_seq(i, 1));
        }
        c.check();
        ++n;
    }
    CHECK(n >= 4); // each content is taken, and may be what there is no memory for
    CHECK(c.pos(2) == 1);
    CHECK(c.pos(7) == 5);
    c.check();
}

TEST_CASE("a fork needs no memory") {
    cells c = six();
    CHECK(done_with(0, [&] { c.fork(3, 6, 1); }));
    CHECK(c.has_seq(6, 1));
    CHECK_FALSE(c.has_seq(3, 1));
    c.check();
}
