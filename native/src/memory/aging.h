// Precision that falls with age. In a group whose rows age, the cells before n_fresh() are fresh: their K and V have the types in which
// they were written. The other cells are old: their K and V have smaller types. New tokens take fresh cells. When too few fresh cells are
// empty, the tokens that are furthest behind move to old cells, and their rows are converted on the way.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/cells.h"
#include "memory/kv_group.h"

namespace kvg {

// At least so many cells age at a time, so that not every token waits for one to age. n_fresh is a multiple of it, as attention reads that
// many cells at a time, all of one type.
constexpr uint32_t AGING_STEP = 128;

// The moves after which n fresh cells are empty; none where n are empty already. Tokens that stand furthest before the end of their
// sequences move first, and those that only a hold keeps before all others. precondition: cells age, and n cells are empty
std::vector<cell_move> plan_aging(const cells & cells, uint32_t n);

// The cells that copies of these cells get, in their order: fresh ones for fresh ones while there are any, else old ones.
// error(KVG_CACHE_FULL): there are too few old ones. what: what needs them, for the message
std::vector<uint32_t> find_copies(const cells & cells, const std::vector<uint32_t> & copied, const char * what);

// Empty cells that lie between used ones. A cell that is fresh and empty is no hole: the next tokens take it.
uint32_t count_holes(const cells & cells);

// Moves rows in host memory, all at once, and converts those that move from a fresh cell to an old one. preconditions: rows age; none moves
// from an old cell to a fresh one
void move_rows(kv_group & group, const std::vector<cell_move> & moves);

} // namespace kvg
