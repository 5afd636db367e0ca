// What a micro-batch attends to in a group.
#pragma once

#include <cstdint>
#include <vector>

#include "graph/seen_ranges.h"
#include "memory/cell_order.h"

namespace kvg {

struct attended_cells {
    bool has_own = false;       // whether any layer's attention is this library's own: else there are no ranges
    bool goes_by_order = false; // whether all attention is, of all groups
    cell_span span = {};        // in the tensors that the graph shows to attention
    cell_order order = {};      // which cell of the span each column of the mask is
    seen_ranges ranges;         // of columns
    // of columns and of tokens, where ALiBi wants them
    std::vector<int32_t> cell_positions = {};
    std::vector<int32_t> token_positions = {};
};

} // namespace kvg
