#include "graph/seen_ranges.h"

#include <algorithm>

#include "cpu/kernel.h"

namespace kvg {

namespace {

constexpr uint32_t LOOKED_AT = 128; // cells at once; no range is shorter

// How many seen cells come before the next range's. From 16 of the shortest on, ranges behind 2^n times as many are 2^n times as long.
uint32_t end_of_range(uint32_t begin, uint32_t shortest) {
    uint32_t octave = 16 * shortest;
    while (octave <= begin / 2) {
        octave *= 2;
    }
    return begin + octave / 16;
}

uint32_t count_seen(const uint16_t * mask, uint32_t n) {
    uint32_t n_seen = 0;
    for (uint32_t i = 0; i < n; ++i) {
        n_seen += mask[i] != ATTEND_HIDDEN;
    }
    return n_seen;
}

// The place of the seen cell before which there are n others.
uint32_t place_of(const uint16_t * mask, uint32_t n) {
    uint32_t i = 0;
    for (; n > 0 || mask[i] == ATTEND_HIDDEN; ++i) {
        n -= mask[i] != ATTEND_HIDDEN;
    }
    return i;
}

} // namespace

uint32_t seen_ranges::count(uint32_t n_seen, uint32_t shortest) {
    uint32_t n = 1;
    for (uint32_t end = end_of_range(0, shortest); end < n_seen; end = end_of_range(end, shortest)) {
        ++n;
    }
    return n;
}

void seen_ranges::find(const uint16_t * mask, uint32_t n_tokens, uint32_t n_kv) {
    n_ = 1;
    is_shared_ = true;
    const uint32_t most = count(n_kv, shortest_);
    if (most == 1) {
        return;
    }
    begins_.assign(size_t{n_tokens} * (most + 1), n_kv);
    std::fill_n(begins_.begin(), n_tokens, 0);
    uint64_t n_seen = 0;
    for (uint32_t t = 0; t < n_tokens; ++t) {
        n_seen += find_of(mask + size_t{t} * n_kv, t, n_tokens, n_kv);
    }
    is_shared_ = n_seen > 2 * uint64_t{n_kv};
}

// Returns how many cells the token sees.
uint32_t seen_ranges::find_of(const uint16_t * mask, uint32_t token, uint32_t n_tokens, uint32_t n_kv) {
    uint32_t n_before = 0;
    uint32_t end = end_of_range(0, shortest_);
    uint32_t n = 1;
    for (uint32_t c = 0; c < n_kv; c += LOOKED_AT) {
        const uint32_t n_seen = count_seen(mask + c, std::min(LOOKED_AT, n_kv - c));
        if (n_before + n_seen > end) { // the next range's first cell is among these
            begins_[size_t{n} * n_tokens + token] = c + place_of(mask + c, end - n_before);
            end = end_of_range(end, shortest_);
            ++n;
        }
        n_before += n_seen;
    }
    n_ = std::max(n_, n);
    return n_before;
}

} // namespace kvg
