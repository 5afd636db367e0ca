// In which order attention goes over cells.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/cells.h"

namespace kvg {

// Cells of a span, relative to its first one: all of them, each once. Empty: as they lie.
using cell_order = std::vector<uint32_t>;

// An order in which the positions of each of these sequences rise. What attention adds up goes by it, so where cells were free when a token
// took one changes no bit of what it gets. Cells of the same sequences stay together. Empty, in the time of a look at each cell, where
// cells lie in such an order, as nearly always.
cell_order rising_order(const cells & cells, const seq_set & seqs, const cell_span & span);

} // namespace kvg
