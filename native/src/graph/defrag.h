// Defrag: moves cells' K and V to where the plan says, in place.
#pragma once

#include <cstdint>

#include "cache/defrag_plan.h"
#include "cache/kv_cache.h"
#include "graph/update_graph.h"

namespace kvg {

// Carries out a plan whose sources and destinations don't overlap, in as many graphs as it takes; the cells follow each graph.
// Returns the number of cells moved. On error(KVG_DEVICE) some moves may be complete; none is half done.
uint32_t run_moves(update_runner & runner, kv_cache & cache, const std::vector<cell_run> & plan);

} // namespace kvg
