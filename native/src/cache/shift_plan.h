// Which cells a K-shift rotates, and how.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/cells.h"

namespace kvg {

// The cells that wait for a rotation, in order; those excepted whose shift at least `many` of them wait for, unless many is 0.
std::vector<uint32_t> cells_to_rotate(const cells & cells, uint32_t many);

// Waiting cells that carry the same dither.
struct shift_lot {
    uint8_t dither;
    std::vector<cell_span> spans; // runs, to be rotated where they lie
    std::vector<uint32_t> rows;   // the others
};

// Spans begin at multiples of `align`, and there are at most `max_spans`, in all: the longest runs. by_dither: false for a type whose K
// has none, where all are one lot.
std::vector<shift_lot> plan_shift(const cells & cells, bool by_dither, uint32_t align, size_t max_spans);

} // namespace kvg
