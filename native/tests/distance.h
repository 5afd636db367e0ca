#pragma once

#include <cmath>
#include <vector>

// Root mean square of the differences; a may be longer.
inline double distance(const std::vector<float> & a, const std::vector<float> & b) {
    double sum = 0;
    for (size_t i = 0; i < b.size(); ++i) {
        sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    }
    return std::sqrt(sum / static_cast<double>(b.size()));
}
