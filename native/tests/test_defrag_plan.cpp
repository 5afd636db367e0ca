#include <doctest/doctest.h>

#include <random>
#include <set>
#include <tuple>

#include "memory/defrag_plan.h"

using namespace kvg;

namespace {

// What a cell stands for, wherever it is: its sequences and position, and which one it was in the beginning.
using content = std::tuple<seq_set, int32_t, int32_t>;

std::multiset<content> contents(const cells & c) {
    std::multiset<content> all;
    for (uint32_t i = 0; i < c.size(); ++i) {
        if (!c.is_empty(i)) {
            all.insert({c.set(i), c.pos(i), c.shift(i)});
        }
    }
    return all;
}

uint32_t n_members(const seq_set & set) { return static_cast<uint32_t>(__builtin_popcountll(set[0])); }

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
    const std::vector<cell_move> plan = plan_fill(c);
    REQUIRE(plan.size() == 240);
    for (uint32_t i = 0; i < 240; ++i) {
        CHECK(plan[i].src == 272 + i);
        CHECK(plan[i].dst == 32 + i);
    }
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
        const std::vector<cell_move> plan = plan_fill(c);
        CHECK(plan.size() == beyond);
        std::set<uint32_t> touched;
        for (const cell_move & m : plan) {
            CHECK(touched.insert(m.src).second);
            CHECK(touched.insert(m.dst).second);
        }
        c.move(plan);
        c.check();
        CHECK(c.n_kv() == c.n_used());
    }
}

TEST_CASE("sort: one run per distinct set, in the order promised, in steps of bounded size") {
    std::mt19937 random(20240502);
    for (int round = 0; round < 500; ++round) {
        const uint32_t size = 1 + random() % 150;
        cells c(size, 4);
        for (uint32_t i = 0; i < size; ++i) {
            if (random() % 4 != 0) {
                c.put(i, static_cast<int32_t>(random() % 50), {uint64_t{1} << random() % 4});
            }
        }
        c.apply(c.check_add(random() % 4, 10, 20, 3)); // shifts travel along
        for (int n = 0; n < 8; ++n) {
            const int64_t p0 = random() % 50;
            c.seq_cp(random() % 4, random() % 4, p0, p0 + random() % 30);
        }
        const auto before = contents(c);
        const uint32_t max_ranks = 1 + random() % 20;
        for (const std::vector<cell_move> & step : plan_sort(c, max_ranks)) {
            CHECK(step.size() <= 2 * max_ranks);
            std::set<uint32_t> sources;
            std::set<uint32_t> targets;
            for (const cell_move & m : step) {
                CHECK(sources.insert(m.src).second);
                CHECK(targets.insert(m.dst).second);
            }
            for (const uint32_t dst : targets) {
                REQUIRE((c.is_empty(dst) || sources.count(dst) == 1));
            }
            c.move(step);
            c.check();
        }
        CHECK(contents(c) == before);
        CHECK(c.n_kv() == c.n_used());
        std::set<seq_set> finished;
        for (uint32_t i = 1; i < c.n_used(); ++i) {
            const seq_set a = c.set(i - 1);
            const seq_set b = c.set(i);
            if (a == b) {
                CHECK(c.pos(i - 1) <= c.pos(i));
                continue;
            }
            CHECK(finished.insert(a).second);
            CHECK(finished.count(b) == 0);
            const uint32_t na = n_members(a);
            const uint32_t nb = n_members(b);
            CHECK((na > nb || (na == nb && __builtin_ctzll(a[0]) <= __builtin_ctzll(b[0]))));
        }
        CHECK(plan_sort(c, max_ranks).empty());
    }
}
