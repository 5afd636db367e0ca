// Defrag and copy: moves cells' K and V to where the plan says, in place.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "memory/defrag_plan.h"
#include "memory/kv_cache.h"
#include "memory/update_graph.h"

namespace kvg {

// Whether the device runs what moving cells takes, and writing new ones, for K and V of these types. A remote one can't be asked, and
// keeps only what every backend can.
bool can_keep_on(ggml_backend_dev_t device, const hparams & h, std::initializer_list<ggml_type> types);

// Fills holes: moves whose sources and destinations don't overlap, in as many graphs as it takes; the cells follow each graph.
// On error(KVG_DEVICE) some moves may be complete; none is half done.
void run_fill(update_runner & runner, kv_cache & cache, const std::vector<cell_move> & moves);

// Carries out plan_sort's steps of at most 2 * sort_ranks(cache) moves; the cells follow each step.
// error(KVG_DEVICE): some steps may be complete; when one came to no end, the cache is broken().
void run_sort(update_runner & runner, kv_cache & cache, const std::vector<std::vector<cell_move>> & steps);
uint32_t sort_ranks(const kv_cache & cache);

// Copies K and V only, for copy-on-write: the cells are the caller's to change, once all of it has succeeded.
void run_copy(update_runner & runner, const kv_cache & cache, const std::vector<cell_move> & moves);

} // namespace kvg
