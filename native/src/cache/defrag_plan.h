// Which cell moves where when the cache is compacted.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/cells.h"

namespace kvg {

// n cells from src on go to dst on. Sources and destinations of a plan never overlap.
struct cell_run {
    uint32_t src;
    uint32_t dst;
    uint32_t n;
};

// Holes from the front take the used cells at or beyond n_used, in order: the least number of moves there is.
std::vector<cell_run> plan_fill(const cells & cells);

} // namespace kvg
