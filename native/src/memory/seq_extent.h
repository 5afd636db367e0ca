// The extent of a sequence, kept up to date so that cells need not be searched: the number of its cells, and bounds of their positions and
// places.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace kvg {

// n is the exact number of the sequence's cells. Their positions are in [pos_min, pos_max], and the cells are in [begin, end). While
// is_tight, these bounds are exact. After a cell at a bound was removed, the true range may be smaller.
struct seq_extent {
    uint32_t n = 0;
    int32_t pos_min = std::numeric_limits<int32_t>::max();
    int32_t pos_max = -1;
    uint32_t begin = std::numeric_limits<uint32_t>::max();
    uint32_t end = 0;
    bool is_tight = true;

    void include(int32_t pos, uint32_t i) {
        pos_min = std::min(pos_min, pos);
        pos_max = std::max(pos_max, pos);
        begin = std::min(begin, i);
        end = std::max(end, i + 1);
    }
    void add(int32_t pos, uint32_t i) {
        include(pos, i);
        ++n;
    }
    // precondition: the cell was added
    void remove(int32_t pos, uint32_t i) {
        if (--n == 0) {
            *this = {};
            return;
        }
        is_tight = is_tight && pos != pos_min && pos != pos_max && i != begin && i + 1 != end;
    }
};

} // namespace kvg
