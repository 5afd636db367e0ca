// Which cells a K-shift rotates, and how.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/cells.h"

namespace kvg {

// Cells that wait for the same shift may go on waiting where attention can turn queries for them, if they are at least so many, and on
// average so many in a chunk of cells: for each chunk and each shift in it the queries turn anew.
constexpr uint32_t MIN_WAITING = 64;
constexpr uint32_t MIN_WAITING_IN_CHUNK = 32;
constexpr uint32_t WAITING_CHUNK = 128; // of the attention's size

// All cells that wait for a rotation, in order.
std::vector<uint32_t> waiting_cells(const cells & cells);
// Those that may not go on waiting: of a shift those in the emptiest chunks, or all.
std::vector<uint32_t> cells_to_rotate(const cells & cells);

// Waiting cells that carry the same dither.
struct shift_lot {
    uint8_t dither;
    std::vector<cell_span> spans; // runs, to be rotated where they lie
    std::vector<uint32_t> rows;   // the others
};

// Spans begin at multiples of `align`, and there are at most `max_spans`, in all: the longest runs. by_dither: false for a type whose K
// has none, where all are one lot.
std::vector<shift_lot> plan_shift(const cells & cells, bool by_dither, uint32_t align, size_t max_spans);

} // namespace kvg
