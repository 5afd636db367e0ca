// What becomes of the cells whose K-shift is pending: K is rotated now, or the cell waits because attention turns the queries for it.
// This is the only place that decides so, and by how much K turns. Whatever rotates K obeys its lists: the CPU, a device, and what
// copies K for a caller.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/cells.h"

namespace kvg {

// Cells may wait where at least so many have the same shift, and on average so many of them lie in a chunk: queries turn anew for each
// chunk, and for each shift in it.
constexpr uint32_t MIN_WAITING = 64;
constexpr uint32_t MIN_WAITING_IN_CHUNK = 32;
constexpr uint32_t WAITING_CHUNK = 128; // cells: of the attention's size

// How a row turns.
struct turn {
    int32_t by;   // positions
    uint8_t from; // the dither that it carries (shift/dither.h)
    uint8_t to;   // the dither that it carries afterwards
};

struct turned_row {
    uint32_t row;  // the number of its cell, or its place among rows that were copied
    uint32_t turn; // an index
};

struct turn_list {
    std::vector<turn> turns; // no two are equal
    std::vector<turned_row> rows;
};

struct settlement {
    turn_list rotated; // cells whose K is rotated now
    turn_list waiting; // cells that wait, and how queries turn before they meet their K: the other way, without a dither
};

// To be asked when cells lie where they will stay, that is after defrag. can_wait: whether attention can turn queries
settlement settle(const cells & cells, bool can_wait);
// For copies of these cells' rows: all whose K-shift is pending are rotated.
turn_list settle_copies(const cells & cells, const std::vector<uint32_t> & copied);

} // namespace kvg
