// A loop shared out among the team's threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>

#include "team.h"

namespace kvg {

// Calls visit(i) for every i below n, in any order, on up to n_threads threads. visit must not throw.
template <class F> void parallel_for(size_t n, size_t n_threads, F visit) {
    std::atomic<size_t> next{0};
    team::here().run(static_cast<int>(std::min(n, n_threads)), [&](int) {
        for (size_t i = next++; i < n; i = next++) {
            visit(i);
        }
    });
}

} // namespace kvg
