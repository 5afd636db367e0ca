#include <doctest/doctest.h>

#include "cache/shift_plan.h"

using namespace kvg;

namespace {

// 64 cells of one sequence, of which those at the given positions wait for a rotation.
cells waiting(std::initializer_list<int> positions) {
    cells c(64, 1);
    for (uint32_t i = 0; i < 64; ++i) {
        c.put(i, static_cast<int32_t>(i), {1});
    }
    for (const int p : positions) {
        c.apply(c.check_add(0, p, p + 1, 1000));
    }
    return c;
}

using pairs = std::vector<std::pair<uint32_t, uint32_t>>;

pairs spans(const cells & c, uint32_t align, size_t max_spans) {
    pairs out;
    for (const cell_span & span : plan_shift(c, align, max_spans)) {
        out.emplace_back(span.begin, span.n);
    }
    return out;
}

} // namespace

TEST_CASE("runs of waiting cells, and nothing else") {
    CHECK(spans(waiting({}), 1, 8).empty());
    CHECK(spans(waiting({3, 4, 5, 20, 63}), 1, 8) == pairs{{3, 3}, {20, 1}, {63, 1}});
}

TEST_CASE("starts are aligned, and runs that then touch become one") {
    CHECK(spans(waiting({5, 20}), 16, 8) == pairs{{0, 6}, {16, 5}});
    CHECK(spans(waiting({15, 20}), 16, 8) == pairs{{0, 21}});
    CHECK(spans(waiting({5, 9, 40}), 16, 8) == pairs{{0, 10}, {32, 9}});
}

TEST_CASE("too many runs are covered by one span") {
    CHECK(spans(waiting({2, 4, 6}), 1, 3) == pairs{{2, 1}, {4, 1}, {6, 1}});
    CHECK(spans(waiting({2, 4, 6}), 1, 2) == pairs{{2, 5}});
}
