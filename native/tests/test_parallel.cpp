#include <doctest/doctest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "parallel.h"

using namespace kvg;

TEST_CASE("each is visited once, whatever the threads") {
    for (const size_t n : {0u, 1u, 2u, 7u, 1000u}) {
        for (const size_t n_threads : {0u, 1u, 2u, 3u, 16u}) {
            std::vector<std::atomic<int>> visits(n);
            parallel_for(n, n_threads, [&](size_t i) { ++visits[i]; });
            for (const auto & count : visits) {
                CHECK(count == 1);
            }
        }
    }
}

TEST_CASE("threads work at the same time") {
    std::atomic<int> here{0};
    parallel_for(2, 2, [&](size_t) {
        ++here;
        while (here < 2) { // for ever, if one thread had to do both
            std::this_thread::yield();
        }
    });
    CHECK(here == 2);
}
