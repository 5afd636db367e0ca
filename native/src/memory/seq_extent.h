// What is known of a sequence's cells without looking at them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace kvg {

// The number of a sequence's cells, exactly; their positions are in [pos_min, pos_max], the cells in [begin, end). When is_tight the
// outermost positions and cells are at these bounds; after one of those was taken away they may lie further in.
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
