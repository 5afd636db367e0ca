#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/kernel.h"
#include "distance.h"

using namespace kvg;

namespace {

const ggml_type TYPES[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q8_0,
                           GGML_TYPE_Q5_1, GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0};

std::vector<float> normal(size_t n, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution;
    std::vector<float> values(n);
    for (float & x : values) {
        x = distribution(random);
    }
    return values;
}

std::vector<float> padded(std::vector<float> values) {
    values.resize(attend_padded(static_cast<uint32_t>(values.size())), std::numeric_limits<float>::quiet_NaN());
    return values;
}

template <class F> void for_each_kernel(F check) {
    for (const cpu_kernels * const * kernel = kernels_here(); *kernel; ++kernel) {
        CAPTURE(std::string((*kernel)->name));
        check(**kernel);
    }
}

std::vector<float> read(ggml_type type, const std::vector<uint8_t> & row, int64_t n) {
    std::vector<float> values(static_cast<size_t>(n));
    if (type == GGML_TYPE_F32) {
        memcpy(values.data(), row.data(), row.size());
    } else {
        ggml_get_type_traits(type)->to_float(row.data(), values.data(), n);
    }
    return values;
}

} // namespace

TEST_CASE("rows are the floats that ggml reads, and are rounded as well as ggml rounds them") {
    for (const ggml_type type : TYPES) {
        for (const int64_t n : {32, 96, 256, 1000, 7}) {
            if (n % ggml_blck_size(type) != 0) {
                continue;
            }
            CAPTURE(std::string(ggml_type_name(type)));
            CAPTURE(n);
            const std::vector<float> values = normal(static_cast<size_t>(n), 3);
            std::vector<uint8_t> theirs(ggml_row_size(type, n));
            ggml_quantize_chunk(type, values.data(), theirs.data(), 0, 1, n, nullptr);
            const std::vector<float> expected = read(type, theirs, n);
            for_each_kernel([&](const cpu_kernels & kernel) {
                std::vector<float> x = padded(std::vector<float>(values.size()));
                kernel.rows.to_floats(type, theirs.data(), x.data(), static_cast<uint32_t>(n));
                CHECK(std::equal(expected.begin(), expected.end(), x.begin()));

                std::vector<uint8_t> ours(theirs.size());
                kernel.rows.from_floats(type, padded(values).data(), ours.data(), static_cast<uint32_t>(n));
                CHECK(distance(read(type, ours, n), values) <= 1.0001 * distance(expected, values));
            });
        }
    }
}

TEST_CASE("zeros, and a block of zeros among others, are rounded to zeros") {
    std::vector<float> values = normal(96, 4);
    std::fill_n(values.begin() + 32, 32, 0.0f);
    for_each_kernel([&](const cpu_kernels & kernel) {
        std::vector<uint8_t> row(ggml_row_size(GGML_TYPE_Q8_0, 96));
        kernel.rows.from_floats(GGML_TYPE_Q8_0, values.data(), row.data(), 96);
        const std::vector<float> back = read(GGML_TYPE_Q8_0, row, 96);
        CHECK(std::all_of(back.begin() + 32, back.begin() + 64, [](float x) { return x == 0.0f; }));
        CHECK(distance(back, values) < 0.01);
    });
}

TEST_CASE("pairs of dimensions are rotated by their angles, the others stay") {
    for (const head_rotation how : {head_rotation{64, 32, true}, head_rotation{64, 32, false}, head_rotation{80, 10, true},
                                    head_rotation{80, 10, false}, head_rotation{6, 3, true}, head_rotation{2, 1, false}}) {
        const uint32_t n_heads = 3;
        const std::vector<float> values = normal(size_t{n_heads} * how.head_dim, 5);
        const std::vector<float> angles = normal(how.n_pairs, 6);
        std::vector<float> table(size_t{2} * how.n_pairs);
        std::vector<double> expected(values.begin(), values.end());
        for (uint32_t i = 0; i < how.n_pairs; ++i) {
            table[i] = std::cos(angles[i]);
            table[how.n_pairs + i] = std::sin(angles[i]);
            for (uint32_t h = 0; h < n_heads; ++h) {
                const size_t a = size_t{h} * how.head_dim + (how.neox ? i : 2 * i);
                const size_t b = a + (how.neox ? how.n_pairs : 1);
                const double angle = angles[i];
                expected[a] = values[a] * std::cos(angle) - values[b] * std::sin(angle);
                expected[b] = values[a] * std::sin(angle) + values[b] * std::cos(angle);
            }
        }
        for_each_kernel([&](const cpu_kernels & kernel) {
            std::vector<float> x = values;
            kernel.rows.rotate(x.data(), n_heads, how, table.data());
            for (size_t i = 0; i < x.size(); ++i) {
                CHECK(std::abs(x[i] - expected[i]) < 1e-6);
            }
        });
    }
}

TEST_CASE("pieces are multiplied by a Hadamard matrix, the parity of common bits being the sign") {
    for (const uint32_t size : {4u, 8u, 32u, 64u, 256u}) {
        const std::vector<float> values = normal(size_t{2} * size, 7);
        for_each_kernel([&](const cpu_kernels & kernel) {
            std::vector<float> x = values;
            kernel.rows.mix(x.data(), x.size(), size);
            for (uint32_t i = 0; i < 2 * size; ++i) {
                double expected = 0;
                for (uint32_t j = 0; j < size; ++j) {
                    const bool odd = __builtin_parity(i % size & j);
                    expected += (odd ? -1.0 : 1.0) * values[i / size * size + j];
                }
                CHECK(std::abs(x[i] - expected / std::sqrt(size)) < 1e-5);
            }
        });
    }
}
