// Numbers for tests, the same for the same seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace kvg {

// Normally distributed around 0; scale: their standard deviation
inline std::vector<float> random_floats(size_t n, float scale, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> x(n);
    for (float & each : x) {
        each = normal(random);
    }
    return x;
}

inline std::vector<float> random_floats(size_t n, uint32_t seed) { return random_floats(n, 1.0f, seed); }

} // namespace kvg
