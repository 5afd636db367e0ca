// Which cells a K-shift rotates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/cells.h"

namespace kvg {

// Runs of cells that wait for a rotation, their starts rounded down to `align`; above `max_spans` of them, the one span that covers
// all (a rotation by 0 is exact).
std::vector<cell_span> plan_shift(const cells & cells, uint32_t align, size_t max_spans);

} // namespace kvg
