// Defrag and copy: moves cells' K and V to where the plan says, in place.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/defrag_plan.h"
#include "memory/kv_group.h"
#include "memory/update_graph.h"

namespace kvg {

// Whether the device runs what moving cells takes, and writing new ones, for a group's K and V of these types. A remote one can't be asked, and
// keeps only what every backend can.
bool can_keep_on(ggml_backend_dev_t device, const group_spec & spec, const cache_types & types);

// Fills holes: moves whose sources and destinations don't overlap, in as many graphs as it takes; the cells follow each graph.
// On error(KVG_DEVICE) some moves may be complete; none is half done.
void run_fill(kv_group & group, const std::vector<cell_move> & moves);

// Carries out plan_aging's moves. precondition: no K-shift of these cells is pending, and none has a dither (settle_plain)
void run_aging(kv_group & group, const std::vector<cell_move> & moves);

// Carries out plan_sort's steps of at most 2 * sort_ranks(group) moves; the cells follow each step.
// error(KVG_DEVICE): some steps may be complete; when one came to no end, the group is broken().
void run_sort(kv_group & group, const std::vector<std::vector<cell_move>> & steps);
uint32_t sort_ranks(const kv_group & group);

// Copies K and V only, for copy-on-write: the cells are the caller's to change, once all of it has succeeded.
void run_copy(kv_group & group, const std::vector<cell_move> & moves);

} // namespace kvg
