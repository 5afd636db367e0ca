// Composite cells: each head of each layer gets K and V from a cell of its own choice.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/kv_group.h"

namespace kvg {

// Writes into the rows of `kept` what heads had in the rows of `cells`. from: (n_layers, n_head_kv, kept.size()), for each of the group's
// layers and heads an index into `cells`; K and V go together. precondition: `kept` are some of `cells`, and their K was rotated alike.
// An exception may come half way.
void compose_rows(kv_group & group, const std::vector<uint32_t> & cells, const std::vector<uint32_t> & kept,
                  const int32_t * from);

} // namespace kvg
