// Which cell moves where when the cache is compacted.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/cells.h"

namespace kvg {

// Holes from the front take the used cells at or beyond n_used, in order: the least number of moves there is.
// Sources and destinations never overlap. Here and below a reserved cell stays where it is.
std::vector<cell_move> plan_fill(const cells & cells);

// One run of cells per distinct sequence set, from cell 0 on: larger sets first, then the lowest id, then the position.
// Cells that no sequence sees, and a hold keeps, come after all others, where no sequence's attended span goes over them; in the order
// in which they lie, so that what was written together stays together.
// Steps, to be carried out one after the other; the moves of a step happen at once and may form cycles. A step has at most
// 2 * max_ranks moves, and puts max_ranks cells in their final places.
std::vector<std::vector<cell_move>> plan_sort(const cells & cells, uint32_t max_ranks);

} // namespace kvg
