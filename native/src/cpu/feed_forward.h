// Feed-forwards on the CPU, beside their products: what a router gives each expert, what gates let through, and the sum of what experts give.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvg {

// gpt-oss's: how steep its sigmoid is, and where gate and up are clamped.
constexpr float OAI_ALPHA = 1.702f;
constexpr float OAI_LIMIT = 7.0f;

// Of n numbers each by itself, so that a number's result depends on nothing else. out may be one of the others.
using gate_function = void (*)(const float * gate, const float * up, float * out, uint32_t n);

// Some rows of many, each multiplied by its weight, are added up in their order.
struct weighted_rows {
    const float * y;
    uint64_t stride;
    const int32_t * places;
    const float * weights; // nullptr: all are 1
    uint32_t n_rows;
};

// Rows of floats, each multiplied with the matrix of a router.
struct route_job {
    const float * weights; // (n_in, n_out)
    const float * bias;    // (n_out), or nullptr
    const float * x;       // (n_in, n_rows)
    size_t x_stride;       // floats from one row to the next
    float * out;           // (n_out, n_rows)
    uint32_t n_in;         // a multiple of 16
    uint32_t n_out;
    uint32_t n_rows;
};

struct feed_forward_kernel {
    // Outputs [begin, end) of all rows. A number depends on no other row, and on no other output.
    void (*route)(const route_job & job, uint32_t begin, uint32_t end);
    gate_function swiglu;     // silu(gate) * up
    gate_function geglu;      // gelu(gate) * up, by tanh
    gate_function swiglu_oai; // min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (1 + up, clamped)
    // Columns [begin, end) of out, which is the sum.
    void (*sum)(const weighted_rows & rows, float * out, uint32_t begin, uint32_t end);
};

} // namespace kvg
