// Decides for each shifted cell: either its K is rotated now, or the cell waits and attention rotates the queries instead.
//
// Only this file decides that, and by how much K is rotated. Everything that rotates K takes its list from here: the CPU, a device, and
// the functions that copy K for a caller.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/cells.h"

namespace kvg {

// Attention rotates the queries once for each chunk of cells, and for each shift in it. So cells wait only where that pays: at least
// MIN_WAITING cells have the same shift, and a chunk holds MIN_WAITING_IN_CHUNK of them on average.
constexpr uint32_t MIN_WAITING = 64;
constexpr uint32_t MIN_WAITING_IN_CHUNK = 32;
constexpr uint32_t WAITING_CHUNK = 128; // cells; the same as ATTEND_CHUNK

// How a row of K is rotated.
struct row_rotation {
    int32_t by;   // positions
    uint8_t from; // the dither that K carries before (shift/dither.h)
    uint8_t to;   // the dither that K carries afterwards
};

struct rotated_row {
    uint32_t row;   // the number of a cell, or of a row among copied rows
    uint32_t index; // of its rotation in the list
};

struct rotation_list {
    std::vector<row_rotation> rotations; // all different
    std::vector<rotated_row> rows;
};

struct settlement {
    rotation_list rotated; // cells whose K must be rotated now
    rotation_list waiting; // cells that wait, and how queries are rotated for them: in the opposite direction, without dither
};

// Call it when no cell will move any more, that is after defrag. can_wait: whether attention can rotate queries
settlement settle(const cells & cells, bool can_wait);
// The list after which K of these cells is at their positions and carries no dither. Cells that wait are rotated, too.
rotation_list settle_plain(const cells & cells, const std::vector<uint32_t> & those);
// The list for copies of these cells' rows: each copy whose K-shift is pending is rotated. Cells may appear more than once.
rotation_list settle_copies(const cells & cells, const std::vector<uint32_t> & copied);

// The list after which K of these cells is at their positions, and all carry the same dither or none. It is empty where that is so already.
// Cells that wait are rotated, too. precondition: there is a cell
rotation_list settle_alike(const cells & cells, const std::vector<uint32_t> & those);

} // namespace kvg
