// Cells while the host has no memory: what may not fail half way.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#include "memory/cells.h"

namespace {

int64_t allowed = -1; // allocations until one fails; negative: no end

} // namespace

// not inlined: gcc would see malloc and free, and take them for a mismatch
__attribute__((noinline)) void * operator new(std::size_t size) {
    if (allowed == 0) {
        throw std::bad_alloc();
    }
    allowed -= allowed > 0;
    if (void * memory = malloc(size)) {
        return memory;
    }
    throw std::bad_alloc();
}

__attribute__((noinline)) void operator delete(void * memory) noexcept { free(memory); }
__attribute__((noinline)) void operator delete(void * memory, std::size_t) noexcept { free(memory); }

using namespace kvg;

namespace {

// Whether the call gets along with n allocations.
template <class F> bool done_with(int64_t n, F call) {
    allowed = n;
    try {
        call();
        allowed = -1;
        return true;
    } catch (const std::bad_alloc &) {
        allowed = -1;
        return false;
    }
}

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
