// Which cells a K-shift rotates, and how.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/cells.h"

namespace kvg {

// Waiting cells that were rotated equally often before.
struct shift_lot {
    uint8_t turns;
    std::vector<cell_span> spans; // runs, to be rotated where they lie
    std::vector<uint32_t> rows;   // the others
};

// Spans begin at multiples of `align`, and there are at most `max_spans`, in all.
std::vector<shift_lot> plan_shift(const cells & cells, uint32_t align, size_t max_spans);

} // namespace kvg
