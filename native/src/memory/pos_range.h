// Positions from p0 to before p1, as the public interface gives them.
#pragma once

#include <cstdint>
#include <limits>

namespace kvg {

// A negative p0 means 0, a negative p1 means no end.
struct pos_range {
    int64_t p0;
    int64_t p1;
    pos_range(int64_t first, int64_t last)
        : p0(first < 0 ? 0 : first), p1(last < 0 ? std::numeric_limits<int64_t>::max() : last) {}
    bool contains(int32_t pos) const { return pos >= p0 && pos < p1; }
};

} // namespace kvg
