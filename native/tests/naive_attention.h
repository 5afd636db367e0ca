// Attention by its definition, and problems to hold it against.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/kernel.h"

namespace kvg {

constexpr uint16_t HIDDEN = 0xfc00; // -infinity in F16

struct attention_sizes {
    uint32_t head_dim_k;
    uint32_t head_dim_v;
    uint32_t n_head;
    uint32_t n_head_kv;
    uint32_t n_tokens;
    uint32_t n_kv;
};

// Rows of K or V in a type, and the floats that they stand for.
struct rows_of_type {
    uint32_t head_dim;
    std::vector<uint8_t> raw;
    std::vector<float> values; // (head_dim, n_head_kv, n_kv)
    size_t stride;
    size_t head_stride;
    ggml_type type;

    rows_of_type(ggml_type t, uint32_t dim, const attention_sizes & s, std::mt19937 & random) : head_dim(dim), type(t) {
        const int64_t width = int64_t{s.n_head_kv} * dim;
        stride = ggml_row_size(t, width);
        head_stride = ggml_row_size(t, dim);
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

struct attention_problem {
    attention_sizes s;
    std::vector<float> q; // (head_dim_k, n_head, n_tokens)
    rows_of_type k;
    rows_of_type v;
    std::vector<uint16_t> mask; // (n_kv, n_tokens)
    float scale;
    float soft_cap = 0;
    std::vector<float> sinks = {}; // (n_head), or empty
    // ALiBi: (n_head), (n_kv) and (n_tokens); or all empty
    std::vector<float> slopes = {};
    std::vector<int32_t> cell_positions = {};
    std::vector<int32_t> token_positions = {};

    // Each token sees about `share` of the cells, and one at least.
    attention_problem(const attention_sizes & sizes, ggml_type type, double share, std::mt19937 & random)
        : s(sizes), q(size_t{s.n_tokens} * s.n_head * s.head_dim_k), k(type, s.head_dim_k, s, random),
          v(type, s.head_dim_v, s, random), mask(size_t{s.n_tokens} * s.n_kv),
          scale(1.0f / std::sqrt(static_cast<float>(s.head_dim_k))) {
        std::normal_distribution<float> normal(0, 2);
        for (float & x : q) {
            x = normal(random);
        }
        std::bernoulli_distribution sees(share);
        for (uint16_t & m : mask) {
            m = sees(random) ? 0 : HIDDEN;
        }
        for (uint32_t t = 0; t < s.n_tokens; ++t) {
            mask[size_t{t} * s.n_kv + random() % s.n_kv] = 0;
        }
    }
    void lower_by_distance() {
        for (uint32_t h = 0; h < s.n_head; ++h) {
            slopes.push_back(1.0f / static_cast<float>(2u << h % 16));
        }
        for (uint32_t c = 0; c < s.n_kv; ++c) {
            cell_positions.push_back(static_cast<int32_t>(c + c / 7));
        }
        for (uint32_t t = 0; t < s.n_tokens; ++t) { // some cells lie behind them, as in an encoder
            token_positions.push_back(static_cast<int32_t>(s.n_kv / 2 + 3 * t));
        }
    }
    // Each token sees only the cells from `begin` up to `end`.
    void show(uint32_t begin, uint32_t end) {
        for (size_t i = 0; i < mask.size(); ++i) {
            mask[i] = i % s.n_kv >= begin && i % s.n_kv < end ? 0 : HIDDEN;
        }
    }
    size_t out_floats() const { return size_t{s.n_tokens} * s.n_head * s.head_dim_v; }
};

// One query head: adds up softmax(cap(scale * q.k) - slope * distance) . v over the cells that are seen. shares: (n_kv), to which the softmax
// is added
inline void naive_head(const attention_problem & p, uint32_t token, uint32_t head, double * out, double * shares = nullptr) {
    const attention_sizes & s = p.s;
    const uint32_t head_kv = head / (s.n_head / s.n_head_kv);
    const float * q = &p.q[(size_t{token} * s.n_head + head) * s.head_dim_k];
    const double cap = p.soft_cap;
    std::vector<double> scores(s.n_kv, -INFINITY);
    double highest = p.sinks.empty() ? -INFINITY : p.sinks[head];
    for (uint32_t c = 0; c < s.n_kv; ++c) {
        if (p.mask[size_t{token} * s.n_kv + c] == 0) {
            const float * row = &p.k.values[(size_t{c} * s.n_head_kv + head_kv) * s.head_dim_k];
            double dot = 0;
            for (uint32_t d = 0; d < s.head_dim_k; ++d) {
                dot += double{q[d]} * row[d];
            }
            dot *= p.scale;
            scores[c] = cap == 0 ? dot : cap * std::tanh(dot / cap);
            if (!p.slopes.empty()) {
                scores[c] -= double{p.slopes[head]} * std::abs(p.cell_positions[c] - p.token_positions[token]);
            }
            highest = std::max(highest, scores[c]);
        }
    }
    double total = p.sinks.empty() ? 0 : std::exp(p.sinks[head] - highest);
    for (uint32_t c = 0; c < s.n_kv; ++c) {
        if (scores[c] != -INFINITY) {
            const float * row = &p.v.values[(size_t{c} * s.n_head_kv + head_kv) * s.head_dim_v];
            const double weight = std::exp(scores[c] - highest);
            total += weight;
            for (uint32_t d = 0; d < s.head_dim_v; ++d) {
                out[d] += weight * row[d];
            }
        }
    }
    for (uint32_t d = 0; d < s.head_dim_v; ++d) {
        out[d] /= total;
    }
    for (uint32_t c = 0; shares && c < s.n_kv; ++c) {
        shares[c] += scores[c] == -INFINITY ? 0 : std::exp(scores[c] - highest) / total;
    }
}

// (head_dim_v, n_head, n_tokens), in double.
inline std::vector<double> naive_attention(const attention_problem & p) {
    std::vector<double> out(p.out_floats());
    for (uint32_t t = 0; t < p.s.n_tokens; ++t) {
        for (uint32_t h = 0; h < p.s.n_head; ++h) {
            naive_head(p, t, h, &out[(size_t{t} * p.s.n_head + h) * p.s.head_dim_v]);
        }
    }
    return out;
}

// What all tokens and heads give each cell of their attention, (n_kv).
inline std::vector<double> naive_shares(const attention_problem & p) {
    std::vector<double> shares(p.s.n_kv);
    for (uint32_t t = 0; t < p.s.n_tokens; ++t) {
        for (uint32_t h = 0; h < p.s.n_head; ++h) {
            std::vector<double> out(p.s.head_dim_v);
            naive_head(p, t, h, out.data(), shares.data());
        }
    }
    return shares;
}

// The greatest difference; a NaN is the worst.
inline double worst(const std::vector<float> & ours, const std::vector<double> & theirs) {
    double most = 0;
    for (size_t i = 0; i < ours.size(); ++i) {
        const double error = std::abs(ours[i] - theirs[i]);
        most = error <= most ? most : error;
    }
    return most;
}

} // namespace kvg
