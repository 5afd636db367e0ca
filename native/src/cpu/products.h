// Products of quantized weights with rows of floats on the CPU: what it does instead of ggml's operation where it is faster.
//
// A row is rounded to bytes, 32 at a time with a scale, as ggml rounds it. 16 rows of weights are worked on together, and each has a lane
// of a vector. Sums of 32 products are integers, in whatever order; these meet their scales one after the other. So what a row gives
// depends to the last bit on nothing else: not on the other rows, nor on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include <ggml.h>

namespace kvg {

constexpr uint32_t PRODUCT_BLOCK = 32; // numbers with one scale
constexpr uint32_t PRODUCT_TILE = 16;  // rows of weights that are worked on together

// A block of a rounded row, beside its 32 numbers.
struct rounded_scale {
    float scale;
    int32_t lift; // -128 times the sum of the numbers: weights are raised by 128
};

// Where the scales of a rounded row of n begin: behind its numbers, which are read 64 at a time.
static constexpr size_t rounded_scales_at(size_t n) { return (n + 63) / 64 * 64; }
// Bytes of a rounded row.
static constexpr size_t rounded_bytes(size_t n) { return rounded_scales_at(n) + n / PRODUCT_BLOCK * sizeof(rounded_scale); }

struct product_job {
    const uint8_t * weights; // (n_in, n_out), quantized
    size_t weight_stride;    // bytes of a row
    const uint8_t * rows;    // n_rows of rounded_bytes(n_in)
    float * out;             // (n_out, n_rows)
    uint32_t n_in;           // a multiple of PRODUCT_BLOCK
    uint32_t n_out;
    uint32_t n_rows;
};

struct product_kernel {
    // n: a multiple of PRODUCT_BLOCK
    void (*round)(const float * x, uint8_t * row, uint32_t n);
    // Tiles [begin, end) of the weights with all rows. The last tile may have fewer rows of weights.
    void (*run)(const product_job & job, uint32_t begin, uint32_t end);
};

// nullptr where ggml is as good: for other types, and on other CPUs.
const product_kernel * product_kernel_for(ggml_type type);

} // namespace kvg
