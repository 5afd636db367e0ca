// What a micro-batch attends to in a group.
#pragma once

#include "graph/seen_ranges.h"
#include "memory/cell_order.h"

namespace kvg {

struct attended_cells {
    bool goes_by_order = false; // whether all attention is this library's own, which can
    cell_span span = {};        // in the tensors that the graph shows to attention
    cell_order order = {};      // which cell of the span each column of the mask is
    seen_ranges ranges;         // of columns
};

} // namespace kvg
