// Slots: the empty cells that the tokens of a batch take.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/cells.h"

namespace kvg {

// error(KVG_CACHE_FULL) when fewer than n cells are empty. what: what needs the cells, for the message
void require_room(const cells & cells, uint32_t n, const char * what);

// Returns n empty cells. The longest runs of empty cells are taken first, so that a batch uses few runs. Fails as require_room() does.
std::vector<uint32_t> find_slots(const cells & cells, uint32_t n, const char * what);

} // namespace kvg
