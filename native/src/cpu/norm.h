// RMS norms on the CPU (Zhang and Sennrich 2019), of one row at a time.
#pragma once

#include <cstdint>

namespace kvg {

struct norm_kernel {
    // What the n numbers of a row are multiplied by: 1 / sqrt(mean of their squares + eps). Squares are added in F64, as ggml adds them.
    float (*factor)(const float * x, uint32_t n, float eps);
    // out = x * factor * weight, n numbers, of which each depends on no other one.
    void (*apply)(const float * x, const float * weight, float factor, float * out, uint32_t n);
};

} // namespace kvg
