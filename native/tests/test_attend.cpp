#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/kernel.h"

using namespace kvg;

namespace {

constexpr uint16_t HIDDEN = 0xfc00;

struct sizes {
    uint32_t head_dim;
    uint32_t n_head;
    uint32_t n_head_kv;
    uint32_t n_tokens;
    uint32_t n_kv;
    uint32_t n_ranges;
};

// Rows of a type, and the floats that they stand for.
struct matrix {
    std::vector<uint8_t> raw;
    std::vector<float> values;
    size_t stride;
    size_t head_stride;
    ggml_type type;

    matrix(ggml_type t, const sizes & s, std::mt19937 & random) : type(t) {
        const int64_t width = int64_t{s.n_head_kv} * s.head_dim;
        stride = ggml_row_size(t, width);
        head_stride = ggml_row_size(t, s.head_dim);
        std::normal_distribution<float> normal;
        values.resize(static_cast<size_t>(s.n_kv * width));
        for (float & x : values) {
            x = normal(random);
        }
        raw.resize(stride * s.n_kv);
        ggml_quantize_chunk(t, values.data(), raw.data(), 0, s.n_kv, width, nullptr);
        if (t == GGML_TYPE_F32) {
            memcpy(raw.data(), values.data(), raw.size());
        } else {
            ggml_get_type_traits(t)->to_float(raw.data(), values.data(), s.n_kv * width);
        }
    }
    attend_rows rows() const { return {raw.data(), stride, head_stride, type}; }
};

// The definition, in double: softmax(scale * q.k) . v over the cells that are seen.
std::vector<double> naive(const sizes & s, const std::vector<float> & q, const matrix & k, const matrix & v,
                          const std::vector<uint16_t> & mask, float scale) {
    std::vector<double> out(q.size());
    for (uint32_t t = 0; t < s.n_tokens; ++t) {
        for (uint32_t h = 0; h < s.n_head; ++h) {
            const uint32_t head_kv = h / (s.n_head / s.n_head_kv);
            const size_t at = (size_t{t} * s.n_head + h) * s.head_dim;
            std::vector<double> scores;
            std::vector<size_t> rows;
            double highest = -INFINITY;
            for (uint32_t c = 0; c < s.n_kv; ++c) {
                if (mask[size_t{t} * s.n_kv + c] != 0) {
                    continue;
                }
                rows.push_back((size_t{c} * s.n_head_kv + head_kv) * s.head_dim);
                double dot = 0;
                for (uint32_t d = 0; d < s.head_dim; ++d) {
                    dot += double{q[at + d]} * k.values[rows.back() + d];
                }
                scores.push_back(dot * scale);
                highest = std::max(highest, scores.back());
            }
            double total = 0;
            for (size_t i = 0; i < rows.size(); ++i) {
                const double weight = std::exp(scores[i] - highest);
                total += weight;
                for (uint32_t d = 0; d < s.head_dim; ++d) {
                    out[at + d] += weight * v.values[rows[i] + d];
                }
            }
            for (uint32_t d = 0; d < s.head_dim; ++d) {
                out[at + d] /= total;
            }
        }
    }
    return out;
}

std::vector<float> with_kernel(const attend_kernel & kernel, const sizes & s, const std::vector<float> & q, const matrix & k,
                               const matrix & v, const std::vector<uint16_t> & mask, float scale,
                               const attend_rotations & waiting = {}) {
    std::vector<float> out(q.size(), std::numeric_limits<float>::quiet_NaN());
    const uint32_t group = s.n_head / s.n_head_kv;
    const size_t floats = size_t{s.n_tokens} * group * attend_partial_floats(s.head_dim);
    std::vector<float> scratch(attend_scratch_floats(s.head_dim, group));
    std::vector<float> partial(floats * s.n_ranges);
    const attend_job job = {q.data(), k.rows(),    v.rows(),   mask.data(), out.data(), scale,  s.head_dim,
                            s.n_head, s.n_head_kv, s.n_tokens, s.n_kv,      s.n_ranges, waiting};
    const uint32_t half = s.n_tokens / 2; // tokens in two units
    for (uint32_t head_kv = 0; head_kv < s.n_head_kv; ++head_kv) {
        for (const auto & [begin, end] : {std::pair{0u, half}, std::pair{half, s.n_tokens}}) {
            for (uint32_t r = 0; r < s.n_ranges; ++r) {
                kernel.run(job, {begin, end, head_kv, r}, partial.data() + r * floats, scratch.data());
            }
            kernel.merge(job, {begin, end, head_kv, 0}, partial.data(), floats);
        }
    }
    return out;
}

double worst(const std::vector<float> & ours, const std::vector<double> & theirs) {
    double most = 0;
    for (size_t i = 0; i < ours.size(); ++i) {
        const double error = std::abs(ours[i] - theirs[i]);
        most = error <= most ? most : error; // a NaN is the worst
    }
    return most;
}

std::vector<float> queries(const sizes & s, std::mt19937 & random) {
    std::normal_distribution<float> normal(0, 2);
    std::vector<float> q(size_t{s.n_tokens} * s.n_head * s.head_dim);
    for (float & x : q) {
        x = normal(random);
    }
    return q;
}

// Each token sees about `share` of the cells, and one at least.
std::vector<uint16_t> random_mask(const sizes & s, double share, std::mt19937 & random) {
    std::vector<uint16_t> mask(size_t{s.n_tokens} * s.n_kv);
    std::bernoulli_distribution sees(share);
    for (uint16_t & m : mask) {
        m = sees(random) ? 0 : HIDDEN;
    }
    for (uint32_t t = 0; t < s.n_tokens; ++t) {
        mask[size_t{t} * s.n_kv + random() % s.n_kv] = 0;
    }
    return mask;
}

template <class F> void for_each_kernel(F test) {
    for (const attend_kernel * const * kernel = attend_kernels_here(); *kernel; ++kernel) {
        CAPTURE((*kernel)->name);
        test(**kernel);
    }
}

} // namespace

TEST_CASE("every instruction set gives the definition's result, whatever the shape and type") {
    const sizes shapes[] = {
        {64, 16, 4, 1, 1000, 2},  {64, 4, 4, 3, 129, 1},  {128, 7, 1, 2, 300, 3}, {8, 8, 4, 5, 40, 1},
        {12, 3, 1, 1, 256, 2},    {80, 6, 2, 32, 70, 1},  {96, 5, 1, 1, 1, 1},    {256, 2, 2, 1, 513, 4},
        {64, 32, 32, 1, 4096, 8}, {64, 2, 1, 1, 4097, 8},
    };
    std::mt19937 random(1);
    for (const sizes & s : shapes) {
        for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_1,
                                     GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0}) {
            if (s.head_dim % ggml_blck_size(type) != 0) {
                continue;
            }
            for (const double share : {1.0, 0.5, 0.02}) {
                CAPTURE(s.head_dim);
                CAPTURE(s.n_kv);
                CAPTURE(share);
                CAPTURE(std::string(ggml_type_name(type)));
                const matrix k(type, s, random);
                const matrix v(type, s, random);
                const std::vector<float> q = queries(s, random);
                const std::vector<uint16_t> mask = random_mask(s, share, random);
                const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
                const std::vector<double> expected = naive(s, q, k, v, mask, scale);
                for_each_kernel([&](const attend_kernel & kernel) {
                    CHECK(worst(with_kernel(kernel, s, q, k, v, mask, scale), expected) < 4e-6);
                });
            }
        }
    }
}

namespace {

// A head times a Walsh-Hadamard matrix of its size, by the definition: entries' signs are the parity of the bits that row and column
// share.
void mix(float * head, uint32_t size) {
    const std::vector<double> x(head, head + size);
    for (uint32_t row = 0; row < size; ++row) {
        double sum = 0;
        for (uint32_t column = 0; column < size; ++column) {
            uint32_t odd = 0;
            for (uint32_t bits = row & column; bits != 0; bits &= bits - 1) {
                odd ^= 1;
            }
            sum += odd ? -x[column] : x[column];
        }
        head[row] = static_cast<float>(sum / std::sqrt(static_cast<double>(size)));
    }
}

// Rotates pair i of a head by (i + 1) times the angle.
void rotate(float * head, const head_rotation & how, double angle) {
    for (uint32_t i = 0; i < how.n_pairs; ++i) {
        float & a = head[how.neox ? i : 2 * i];
        float & b = head[how.neox ? i + how.n_pairs : 2 * i + 1];
        const double x = a;
        const double y = b;
        const double cosine = std::cos(angle * (i + 1));
        const double sine = std::sin(angle * (i + 1));
        a = static_cast<float>(x * cosine - y * sine);
        b = static_cast<float>(x * sine + y * cosine);
    }
}

} // namespace

TEST_CASE("attention to cells that wait is the same as to cells whose K was rotated") {
    const sizes s = {64, 6, 2, 19, 500, 2};
    const uint32_t width = s.n_head_kv * s.head_dim;
    const double angles[] = {0, 0.3, -2.0, 1.1}; // of rotation 0 (none), 1, 2, 3
    std::mt19937 random(5);
    for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_F16}) {
        for (const bool neox : {false, true}) {
            for (const uint32_t mixed : {0u, 32u, 64u}) {
                for (const uint32_t stretch : {1u, 90u, 500u}) { // cells in a row with the same rotation
                    CAPTURE(neox);
                    CAPTURE(mixed);
                    CAPTURE(stretch);
                    CAPTURE(std::string(ggml_type_name(type)));
                    const head_rotation how = {s.head_dim, 20, neox};
                    matrix k(type, s, random);
                    const matrix v(type, s, random);
                    const std::vector<float> q = queries(s, random);
                    const std::vector<uint16_t> mask = random_mask(s, 0.7, random);
                    std::vector<uint32_t> of_cell(s.n_kv);
                    for (uint32_t c = 0; c < s.n_kv; ++c) {
                        of_cell[c] = stretch == s.n_kv ? 3 : (c / stretch) % 4;
                        for (float * head = &k.values[size_t{c} * width]; head < k.values.data() + (size_t{c} + 1) * width;
                             head += s.head_dim) {
                            for (uint32_t piece = 0; mixed != 0 && piece < s.head_dim; piece += mixed) {
                                mix(head + piece, mixed);
                            }
                            rotate(head, how, angles[of_cell[c]]);
                            for (uint32_t piece = 0; mixed != 0 && piece < s.head_dim; piece += mixed) {
                                mix(head + piece, mixed);
                            }
                        }
                    }
                    std::vector<float> tables;
                    for (const double angle : {0.3, -2.0, 1.1}) { // queries are rotated in the opposite direction
                        for (uint32_t i = 0; i < 2 * how.n_pairs; ++i) {
                            const double by = -angle * (i % how.n_pairs + 1);
                            tables.push_back(static_cast<float>(i < how.n_pairs ? std::cos(by) : std::sin(by)));
                        }
                    }
                    const std::vector<double> expected = naive(s, q, k, v, mask, 0.125f);
                    for_each_kernel([&](const attend_kernel & kernel) {
                        const auto found =
                            with_kernel(kernel, s, q, k, v, mask, 0.125f, {of_cell.data(), tables.data(), how, mixed});
                        CHECK(worst(found, expected) < 1e-5);
                    });
                }
            }
        }
    }
}

TEST_CASE("scores far apart neither overflow nor lose the greatest") {
    const sizes s = {64, 4, 1, 1, 700, 2};
    std::mt19937 random(2);
    const matrix k(GGML_TYPE_F16, s, random);
    const matrix v(GGML_TYPE_F16, s, random);
    std::vector<float> q = queries(s, random);
    for (float & x : q) {
        x *= 1000.0f;
    }
    const std::vector<uint16_t> mask(s.n_kv, 0);
    const std::vector<double> expected = naive(s, q, k, v, mask, 1.0f);
    for_each_kernel(
        [&](const attend_kernel & kernel) { CHECK(worst(with_kernel(kernel, s, q, k, v, mask, 1.0f), expected) < 4e-6); });
}

TEST_CASE("what lies in hidden cells doesn't matter, and what lies in seen ones isn't kept secret") {
    const sizes s = {64, 4, 2, 1, 640, 2};
    std::mt19937 random(3);
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_F32}) {
        matrix k(type, s, random);
        matrix v(type, s, random);
        const std::vector<float> q = queries(s, random);
        std::vector<uint16_t> mask = random_mask(s, 0.5, random);
        const std::vector<double> expected = naive(s, q, k, v, mask, 0.125f);
        for (uint32_t c = 0; c < s.n_kv; ++c) {
            if (mask[c] != 0) {
                memset(k.raw.data() + c * k.stride, 0xff, k.stride); // NaN in either type
                memset(v.raw.data() + c * v.stride, 0xff, v.stride);
            }
        }
        for_each_kernel([&](const attend_kernel & kernel) {
            CHECK(worst(with_kernel(kernel, s, q, k, v, mask, 0.125f), expected) < 4e-6);
            std::vector<uint16_t> all(s.n_kv, 0);
            const matrix sane(type, s, random);
            CHECK(std::isnan(with_kernel(kernel, s, q, k, v, all, 0.125f)[0]));
            CHECK(std::isnan(with_kernel(kernel, s, q, k, sane, all, 0.125f)[0]));
            CHECK(std::isnan(with_kernel(kernel, s, q, sane, v, all, 0.125f)[0]));
        });
    }
}

TEST_CASE("softmax: the first of the greatest, and the sum relative to it") {
    std::mt19937 random(4);
    std::normal_distribution<float> normal(0, 5);
    for (const uint32_t n : {1u, 3u, 4u, 15u, 16u, 17u, 512u, 32003u}) {
        std::vector<float> x(n);
        for (float & value : x) {
            value = normal(random);
        }
        x[n / 2] = x[n - 1] = 30.0f; // the first of equals
        if (n > 4) {
            x[1] = -INFINITY; // a token that can't be
        }
        double sum = 0;
        for (const float value : x) {
            sum += std::exp(double{value} - 30.0);
        }
        CAPTURE(n);
        for_each_kernel([&](const attend_kernel & kernel) {
            const softmax_parts parts = kernel.softmax(x.data(), n);
            CHECK(parts.best == n / 2);
            CHECK(parts.greatest == 30.0f);
            CHECK(parts.sum == doctest::Approx(sum).epsilon(1e-5));
            for (const uint32_t bits : {0x7fc00000u, 0x7fc00001u, 0x7fffffffu, 0xffffffffu, 0x7f800001u, 0x7f800000u}) {
                std::vector<float> y = x;
                memcpy(&y[n - 1], &bits, sizeof(bits)); // any NaN, and infinity
                CHECK(std::isnan(kernel.softmax(y.data(), n).sum));
            }
            CHECK(std::isnan(kernel.softmax(std::vector<float>(n, -INFINITY).data(), n).sum));
        });
    }
}
