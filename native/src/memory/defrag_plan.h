// Plans for defrag: which cell moves where.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/cells.h"

namespace kvg {

constexpr cell_span ALL_CELLS = {0, UINT32_MAX};

// The used cells at or beyond n_used move into the holes below it, in order. No plan has fewer moves. A cell is never both a source and a
// destination. Reserved cells stay where they are, here and in plan_sort(). All this is done among these cells, as if there were no others,
// here and in plan_sort().
std::vector<cell_move> plan_fill(const cells & cells, const cell_span & among = ALL_CELLS);

// Cells with the same set of sequences become one run, from cell 0 on. The order: larger sets first, then the set with the lowest id, then
// the position. Cells that only a hold keeps come last, so that no attended span contains them. They keep their order, so that cells that
// were written together stay together.
//
// Returns steps, to be done one after the other. The moves of a step happen at once and may form cycles. A step has at most
// 2 * max_ranks moves, and puts max_ranks cells in their final places.
std::vector<std::vector<cell_move>> plan_sort(const cells & cells, uint32_t max_ranks, const cell_span & among = ALL_CELLS);

} // namespace kvg
