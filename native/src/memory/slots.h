// Where the tokens of a batch go.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/cells.h"

namespace kvg {

// error(KVG_CACHE_FULL), which names `what` needs them, when fewer than n cells are empty
void require_room(const cells & cells, uint32_t n, const char * what);

// n empty cells, the longest runs of empty cells first, so that a batch lands in as few runs as it can. As require_room.
std::vector<uint32_t> find_slots(const cells & cells, uint32_t n, const char * what);

} // namespace kvg
