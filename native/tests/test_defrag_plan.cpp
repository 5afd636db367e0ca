#include <doctest/doctest.h>

#include <random>
#include <set>

#include "cache/defrag_plan.h"

using namespace kvg;

namespace {

uint32_t n_moved(const std::vector<cell_run> & plan) {
    uint32_t n = 0;
    for (const cell_run & run : plan) {
        n += run.n;
    }
    return n;
}

} // namespace

TEST_CASE("a compact cache has nothing to move") {
    cells c(8, 1);
    CHECK(plan_fill(c).empty());
    for (uint32_t i = 0; i < 8; ++i) {
        c.put(i, static_cast<int32_t>(i), {1});
    }
    CHECK(plan_fill(c).empty());
}

TEST_CASE("one hole in the middle takes the tail in one run") {
    cells c(512, 1);
    for (uint32_t i = 0; i < 512; ++i) {
        c.put(i, static_cast<int32_t>(i), {1});
    }
    c.seq_rm(0, 32, 272);
    const std::vector<cell_run> plan = plan_fill(c);
    REQUIRE(plan.size() == 1);
    CHECK(plan[0].src == 272);
    CHECK(plan[0].dst == 32);
    CHECK(plan[0].n == 240);
}

TEST_CASE("random holes: as few moves as there can be, no overlap, compact afterwards") {
    std::mt19937 random(20240501);
    for (int round = 0; round < 500; ++round) {
        const uint32_t size = 1 + random() % 200;
        cells c(size, 1);
        const uint32_t density = random() % 101;
        for (uint32_t i = 0; i < size; ++i) {
            if (random() % 100 < density) {
                c.put(i, static_cast<int32_t>(i), {1});
            }
        }
        uint32_t beyond = 0;
        for (uint32_t i = c.n_used(); i < size; ++i) {
            beyond += !c.is_empty(i);
        }
        const std::vector<cell_run> plan = plan_fill(c);
        CHECK(n_moved(plan) == beyond);
        std::set<uint32_t> touched;
        for (const cell_run & run : plan) {
            for (uint32_t i = 0; i < run.n; ++i) {
                CHECK(touched.insert(run.src + i).second);
                CHECK(touched.insert(run.dst + i).second);
                c.move(run.src + i, run.dst + i);
            }
        }
        c.check();
        CHECK(c.n_kv() == c.n_used());
    }
}
