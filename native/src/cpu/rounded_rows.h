// Rows that were rounded to bytes: all numbers of a row, then what lies beside each block of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/products.h"

namespace kvg {

// As ggml rounds to Q8_0
struct rounded_32 {
    static constexpr uint32_t N = 32; // numbers with one scale
    float scale;
    int32_t lift;         // -128 times the sum of the numbers, for weights that are raised by 128
    int32_t lift_of_half; // the same of the first 16
    float total;          // scale times the sum of the numbers, for weights with a minimum
};

// As it rounds to Q8_K
struct rounded_256 {
    static constexpr uint32_t N = LARGEST_BLOCK; // 256
    float scale;
    int16_t sums16[16]; // of 16 numbers each
    int16_t sums32[8];
};

// Rows are whole lines of memory. Where the first begins at one, too, as it most often does, AMX reads 64 numbers of 16 rows six times as fast.
template <class B> constexpr size_t row_bytes(uint32_t n) { return (n + n / B::N * sizeof(B) + 63) / 64 * 64; }

namespace products_vnni {
extern const row_form by_32;
extern const row_form by_256;
} // namespace products_vnni

} // namespace kvg
