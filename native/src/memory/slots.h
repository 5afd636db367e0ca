// Slots: the empty cells that the tokens of a batch take.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/cells.h"

namespace kvg {

// error(KVG_CACHE_FULL) when fewer than n cells are empty or reusable (memory/window.cpp). what: what needs the cells, for the message.
// kept: a sequence whose cells are not reused; cells::NOBODY: none is
void require_room(const cells & cells, uint32_t n, const char * what, uint32_t kept = cells::NOBODY);

// The first n empty cells among [begin, end), the longest runs first; fewer when there are fewer.
std::vector<uint32_t> empty_cells(const cells & cells, uint32_t begin, uint32_t end, uint32_t n);

// Returns n empty cells, fresh ones where cells age. The longest runs of empty cells are taken first, so that a batch uses few runs. Cells
// are reused first when too few are empty. Fails as require_room() does. precondition: enough of the fresh cells are empty
std::vector<uint32_t> find_slots(cells & cells, uint32_t n, const char * what, uint32_t kept = cells::NOBODY);

} // namespace kvg
