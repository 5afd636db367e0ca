// Products of weights with rows of floats on the CPU: what it does instead of ggml's operation where it is faster.
//
// A row is rounded to bytes as ggml rounds it. 16 rows of weights are worked on together. Sums of products that share a scale are integers,
// in whatever order; these meet their scales one after the other. Beside weights in BF16 a row is rounded to BF16; beside F16 it stays as it
// is. Their sums have one order, too. So what a row gives depends to the last bit on nothing else: not on the other rows, nor on the number
// of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include <ggml.h>

namespace kvg {

constexpr uint32_t PRODUCT_TILE = 16;   // rows of weights that are worked on together
constexpr uint32_t LARGEST_BLOCK = 256; // numbers of a row that are rounded together

struct product_job {
    const uint8_t * weights; // (n_in, n_out)
    size_t weight_stride;    // bytes of a row
    const uint8_t * rows;    // n_rows, rounded
    float * out;             // (n_out, n_rows)
    uint32_t n_in;           // whole blocks of the weights
    uint32_t n_out;
    uint32_t n_rows;
    const float * added = nullptr; // (n_out, n_rows): what results are added to; nullptr: nothing
};

// How rows are rounded for some types of weights.
struct row_form {
    size_t (*bytes)(uint32_t n);
    // Numbers [begin, end) of a row of n. x: the first of them. Whole blocks: begin is a multiple of LARGEST_BLOCK
    void (*round_part)(const float * x, uint8_t * row, uint32_t n, uint32_t begin, uint32_t end);
    void round(const float * x, uint8_t * row, uint32_t n) const { round_part(x, row, n, 0, n); }
};

struct product_kernel {
    const row_form & form;
    // Tiles [begin, end) of the weights with all rows. The last tile may have fewer rows of weights.
    void (*run)(const product_job & job, uint32_t begin, uint32_t end);
};

// The kernels of one instruction set.
struct product_set {
    const char * name;
    // nullptr where another set or ggml is as good
    const product_kernel * (*kernel_for)(ggml_type type);
};

// All that this CPU runs, the best first; nullptr after the last.
const product_set * const * product_sets_here();
// The best one; nullptr where ggml is as good, and where this CPU runs none.
const product_kernel * product_kernel_for(ggml_type type);

} // namespace kvg
