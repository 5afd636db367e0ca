#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "graph/seen_ranges.h"
#include "naive_attention.h"

using namespace kvg;

namespace {

// Each token's ranges have as many of the cells that it sees as they should, one range behind the other.
void check_ranges(uint32_t shortest, uint32_t n_kv, double share, std::mt19937 & random) {
    std::bernoulli_distribution sees(share);
    std::vector<uint16_t> mask(3 * n_kv);
    for (uint16_t & m : mask) {
        m = sees(random) ? 0 : HIDDEN;
    }
    seen_ranges ranges(shortest);
    ranges.find(mask.data(), 3, n_kv);
    REQUIRE(ranges.n() <= seen_ranges::count(n_kv, shortest));
    CHECK(ranges.n() <= 16 + 16 * std::max(0.0, std::ceil(std::log2(n_kv / (16.0 * shortest)))));
    for (uint32_t t = 0; ranges.begins() && t < 3; ++t) {
        const uint16_t * row = &mask[t * n_kv];
        const auto n_seen = static_cast<uint32_t>(std::count(row, row + n_kv, 0));
        uint32_t n_before = 0;
        CHECK(ranges.begins()[t] == 0);
        CHECK(ranges.begins()[ranges.n() * 3 + t] == n_kv);
        for (uint32_t r = 0; r < ranges.n(); ++r) {
            const uint32_t begin = ranges.begins()[r * 3 + t];
            const uint32_t end = ranges.begins()[(r + 1) * 3 + t];
            REQUIRE(begin <= end);
            const uint32_t doublings =
                n_before < 32 * shortest ? 0 : static_cast<uint32_t>(std::log2(n_before / (16 * shortest)));
            CHECK(std::count(row + begin, row + end, 0) == std::min(shortest << doublings, n_seen - n_before));
            n_before += std::min(shortest << doublings, n_seen - n_before);
        }
        CHECK(n_before == n_seen);
    }
}

} // namespace

TEST_CASE("ranges are by the cells that a token sees, and there are few of them") {
    std::mt19937 random(15);
    for (const uint32_t shortest : {256u, 512u}) {
        for (const uint32_t n_kv : {1u, 255u, 256u, 257u, 512u, 513u, 4096u, 9000u, 40000u}) {
            for (const double share : {1.0, 0.5, 0.03}) {
                check_ranges(shortest, n_kv, share, random);
            }
        }
    }
}
