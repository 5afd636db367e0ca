// Precision that falls with age: in a group whose rows age, cells before n_fresh() have rows as they were written, and the others have
// rows of smaller types. New tokens take fresh cells. When too few of those are empty, the oldest content moves to other cells, and its
// rows are converted on the way.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/cells.h"
#include "memory/kv_group.h"

namespace kvg {

// Cells that age at a time, so that not every token has to wait for one. Also what n_fresh is a multiple of: attention reads that many
// cells at a time, all of one type.
constexpr uint32_t AGING_STEP = 128;

// The moves after which n fresh cells are empty. What stands furthest before the end of its sequences goes first; cells that only a hold
// keeps go before all others. None where n are empty already. precondition: cells age, and n cells are empty
std::vector<cell_move> plan_aging(const cells & cells, uint32_t n);

// The cells that copies of these cells get, in their order: fresh ones for fresh ones while there are any, else old ones.
// error(KVG_CACHE_FULL): there are too few old ones. what: what needs them, for the message
std::vector<uint32_t> find_copies(const cells & cells, const std::vector<uint32_t> & copied, const char * what);

// Empty cells that lie between used ones. A cell that is fresh and empty is no hole: the next tokens take it.
uint32_t count_holes(const cells & cells);

// Moves rows in host memory, all at once, and converts those of fresh cells that get to others. preconditions: rows age; no old cell gets to
// a fresh one
void move_rows(kv_group & group, const std::vector<cell_move> & moves);

} // namespace kvg
