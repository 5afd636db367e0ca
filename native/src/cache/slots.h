// Where the tokens of a batch go.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/cells.h"

namespace kvg {

// n empty cells, the longest runs of empty cells first, so that a batch lands in as few runs as it can.
// Fewer than n are empty: error(KVG_CACHE_FULL).
std::vector<uint32_t> find_slots(const cells & cells, uint32_t n);

} // namespace kvg
