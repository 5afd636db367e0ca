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

} // namespace

TEST_CASE("the longest run of empty cells comes first") {
    using slots = std::vector<uint32_t>;
    CHECK(find_slots(picture("......"), 3, "the batch") == slots{0, 1, 2});
    CHECK(find_slots(picture("a.bb...c"), 2, "the batch") == slots{4, 5});
    CHECK(find_slots(picture("a.bb...c"), 4, "the batch") == slots{4, 5, 6, 1});
    CHECK(find_slots(picture(".a.b"), 2, "the batch") == slots{0, 2}); // equal runs: the lower one
    CHECK(find_slots(picture("ab...."), 4, "the batch") == slots{2, 3, 4, 5});
    CHECK(find_slots(picture("abc"), 0, "the batch").empty());
}

TEST_CASE("no room is an error that says how much there is") {
    try {
        find_slots(picture("a.b"), 2, "the batch");
        FAIL("expected an error");
    } catch (const error & e) {
        CHECK(e.status() == KVG_CACHE_FULL);
        CHECK(std::string(e.what()).find("needs 2 cells and 1 of 3") != std::string::npos);
    }
}
