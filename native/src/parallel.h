// A loop shared out among threads, for copies that one core can't make at the memory's speed.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

namespace kvg {

// Calls visit(i) for every i below n, in any order, on up to n_threads threads. visit must not throw. Threads that the system refuses
// are done without.
template <class F> void parallel_for(size_t n, size_t n_threads, F visit) {
    std::atomic<size_t> next{0};
    const auto work = [&] {
        for (size_t i = next++; i < n; i = next++) {
            visit(i);
        }
    };
    std::vector<std::thread> helpers;
    helpers.reserve(n_threads);
    try {
        while (helpers.size() + 1 < std::min(n, n_threads)) {
            helpers.emplace_back(work);
        }
    } catch (const std::exception &) { // no thread, or no memory for one
    }
    work();
    for (std::thread & helper : helpers) {
        helper.join();
    }
}

} // namespace kvg
