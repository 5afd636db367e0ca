// What tests of K-shifts share.
#pragma once

#include <cstdint>
#include <vector>

#include "shift/settle.h"

namespace kvg {

using numbers = std::vector<uint32_t>;

inline numbers rows_of(const rotation_list & list) {
    numbers rows;
    for (const rotated_row & row : list.rows) {
        rows.push_back(row.row);
    }
    return rows;
}

// What a K-shift makes of the cells.
inline void rotate(cells & c, const rotation_list & list) {
    for (const rotated_row & row : list.rows) {
        c.set_rotated(row.row, list.rotations[row.index].to);
    }
}

// 64 cells of one sequence.
inline cells full() {
    cells c(64, 1);
    for (uint32_t i = 0; i < 64; ++i) {
        c.put(i, static_cast<int32_t>(i), {1});
    }
    return c;
}

} // namespace kvg
