// Who does which part of an operation of ours. Where ggml computes a graph on one thread (step.cpp) the team shares it, in pieces that are
// claimed; else ggml's threads do, each one part.
#pragma once

#include <algorithm>
#include <cstdint>

#include "team.h"

namespace kvg {

// What takes some microseconds: to share less out takes longer than to do it.
constexpr uint32_t PASSED_AT_ONCE = 1 << 13;     // numbers that are read and written once
constexpr uint64_t MULTIPLIED_AT_ONCE = 1 << 17; // pairs of numbers

// Calls visit(begin, end, thread) for ranges that together are [0, n), in whole pieces of `width`, of which n is a multiple. ith, nth:
// ggml's. min_piece: what is worth claiming, in the unit of n; less than two of these aren't shared. thread: which of them, from 0
template <class F> void share_out_to(uint32_t n, uint32_t width, uint32_t min_piece, int ith, int nth, F visit) {
    constexpr uint32_t PIECES = 4; // for each thread: a slow one leaves so much less to wait for, and kernels begin slowly
    const uint32_t n_units = n / width;
    const auto at = [&](uint32_t i, uint32_t n_parts) { return part_begin(n_units, i, n_parts) * width; };
    if (nth > 1) {
        const auto i = static_cast<uint32_t>(ith);
        return visit(at(i, static_cast<uint32_t>(nth)), at(i + 1, static_cast<uint32_t>(nth)), i);
    }
    const uint32_t most = std::min(n / std::max(min_piece, 1u), n_units);
    const uint32_t n_sharing = std::min(static_cast<uint32_t>(team_share::n_threads()), most);
    if (n_sharing < 2) {
        return visit(0, n, 0);
    }
    const uint32_t n_pieces =
        std::min(most / n_sharing, PIECES) * n_sharing; // as many for each: few may take very different times
    const int n_threads = static_cast<int>(n_sharing);
    pieces all(n_pieces, n_threads);
    team::here().run(n_threads, [&](int thread) {
        for (uint32_t i = 0; all.next(thread, i);) {
            visit(at(i, n_pieces), at(i + 1, n_pieces), static_cast<uint32_t>(thread));
        }
    });
}

// The same where a thread has nothing of its own: visit(begin, end).
template <class F> void share_out(uint32_t n, uint32_t width, uint32_t min_piece, int ith, int nth, F visit) {
    share_out_to(n, width, min_piece, ith, nth, [&](uint32_t begin, uint32_t end, uint32_t) { visit(begin, end); });
}

} // namespace kvg
