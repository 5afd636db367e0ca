#include <doctest/doctest.h>

#include <set>

#include "error.h"
#include "memory/slots.h"

using namespace kvg;

namespace {

// A cache whose cell i is used where the picture has a letter.
cells picture(const char * drawn) {
    uint32_t n = 0;
    while (drawn[n]) {
        ++n;
    }
    cells c(n, 1);
    for (uint32_t i = 0; i < n; ++i) {
        if (drawn[i] != '.') {
            c.put(i, static_cast<int32_t>(i), {1});
        }
    }
    return c;
}

std::vector<uint32_t> slots_in(const char * drawn, uint32_t n) {
    cells c = picture(drawn);
    return find_slots(c, n, "the batch");
}

} // namespace

TEST_CASE("the longest run of empty cells comes first") {
    using slots = std::vector<uint32_t>;
    CHECK(slots_in("......", 3) == slots{0, 1, 2});
    CHECK(slots_in("a.bb...c", 2) == slots{4, 5});
    CHECK(slots_in("a.bb...c", 4) == slots{4, 5, 6, 1});
    CHECK(slots_in(".a.b", 2) == slots{0, 2}); // equal runs: the lower one
    CHECK(slots_in("ab....", 4) == slots{2, 3, 4, 5});
    CHECK(slots_in("abc", 0).empty());
}

TEST_CASE("no room is an error that says how much there is") {
    try {
        slots_in("a.b", 2);
        FAIL("expected an error");
    } catch (const error & e) {
        CHECK(e.status() == KVG_CACHE_FULL);
        CHECK(std::string(e.what()).find("needs 2 cells and 1 of 3") != std::string::npos);
    }
}
