#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "attend_jobs.h"
#include "graph/seen_ranges.h"

using namespace kvg;

namespace {

// A problem's token alone.
attention_problem alone(const attention_problem & p, uint32_t token) {
    attention_problem one = p;
    one.s.n_tokens = 1;
    const size_t q_row = size_t{p.s.n_head} * p.s.head_dim_k;
    one.q.assign(p.q.begin() + static_cast<std::ptrdiff_t>(token * q_row),
                 p.q.begin() + static_cast<std::ptrdiff_t>((token + 1) * q_row));
    one.mask.assign(p.mask.begin() + token * p.s.n_kv, p.mask.begin() + (token + 1) * p.s.n_kv);
    if (!p.slopes.empty()) {
        one.token_positions = {p.token_positions[token]};
    }
    return one;
}

// The cells that the problem's token sees, one behind the other.
attention_problem without_gaps(const attention_problem & p) {
    attention_problem dense = p;
    dense.s.n_kv = 0;
    for (uint32_t c = 0; c < p.s.n_kv; ++c) {
        if (p.mask[c] == 0) {
            memcpy(&dense.k.raw[dense.s.n_kv * p.k.stride], &p.k.raw[c * p.k.stride], p.k.stride);
            memcpy(&dense.v.raw[dense.s.n_kv * p.v.stride], &p.v.raw[c * p.v.stride], p.v.stride);
            if (!p.slopes.empty()) {
                dense.cell_positions[dense.s.n_kv] = p.cell_positions[c];
            }
            ++dense.s.n_kv;
        }
    }
    dense.mask.assign(dense.s.n_kv, 0);
    return dense;
}

// As a graph has it: ranges by the cells that tokens see.
std::vector<float> by_seen_ranges(const cpu_kernels & kernel, const attention_problem & p) {
    std::vector<float> out(p.out_floats());
    attend_job job = job_of(p, out);
    seen_ranges ranges(256);
    ranges.find(job.mask, job.n_tokens, job.n_kv);
    job.range_begins = ranges.begins();
    const uint32_t group = job.n_head / job.n_head_kv;
    std::vector<float> scratch(attend_scratch_floats(job.head_dim_k, job.head_dim_v, group));
    std::vector<float> partial(size_t{ATTEND_TOKENS} * group * attend_partial_floats(job.head_dim_v));
    for (uint32_t t = 0; t < job.n_tokens; t += ATTEND_TOKENS) {
        for (uint32_t head_kv = 0; head_kv < job.n_head_kv; ++head_kv) {
            const attend_unit unit = {t, std::min(t + ATTEND_TOKENS, job.n_tokens), head_kv, 0, ranges.n()};
            kernel.attend.run(job, unit, partial.data(), scratch.data());
            kernel.attend.finish(job, unit, partial.data());
        }
    }
    return out;
}

bool same_bits(const std::vector<float> & a, const float * b) { return memcmp(a.data(), b, a.size() * sizeof(float)) == 0; }

} // namespace

TEST_CASE("what a token gets is the same to the bit alone and among others, and wherever its cells are") {
    std::mt19937 random(14);
    const attention_sizes shapes[] = {{64, 64, 9, 3, 16, 900},
                                      {80, 80, 4, 4, 13, 140},
                                      {256, 128, 8, 1, 32, 700},
                                      {72, 64, 4, 1, 20, 100},
                                      {64, 64, 2, 1, 3, 6000}};
    for (const attention_sizes & s : shapes) {
        const size_t out_row = size_t{s.n_head} * s.head_dim_v;
        for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
            for (const double share : {1.0, 0.7, 0.2}) {
                if (!fits(type, s)) {
                    continue;
                }
                attention_problem p(s, type, share, random);
                if (share == 0.7) {
                    p.lower_by_distance();
                }
                for (float & x : p.q) {
                    x *= 5; // so that maxima grow on the way
                }
                for (uint32_t t = 0; t < s.n_tokens; ++t) { // what is behind a token is hidden
                    const uint32_t n_behind = s.n_tokens - t - 1;
                    std::fill_n(p.mask.begin() + (t + 1) * s.n_kv - n_behind, n_behind, HIDDEN);
                }
                for_each_kernel([&](const cpu_kernels & kernel) {
                    const std::vector<float> among = by_seen_ranges(kernel, p);
                    CHECK(worst(among, naive_attention(p)) < 2e-5);
                    for (uint32_t t = 0; t < s.n_tokens; ++t) {
                        const attention_problem one = alone(p, t);
                        CHECK(same_bits(by_seen_ranges(kernel, one), &among[t * out_row]));
                        CHECK(same_bits(by_seen_ranges(kernel, without_gaps(one)), &among[t * out_row]));
                    }
                });
            }
        }
    }
}

namespace {

// The rows of column i go to cell order[i].
rows_of_type moved(const rows_of_type & rows, const std::vector<uint32_t> & order) {
    rows_of_type there = rows;
    for (size_t i = 0; i < order.size(); ++i) {
        memcpy(&there.raw[order[i] * rows.stride], &rows.raw[i * rows.stride], rows.stride);
    }
    return there;
}

} // namespace

TEST_CASE("columns in another order than cells: rows, rotations and old rows are those of the cells") {
    std::mt19937 random(16);
    const attention_sizes s = {64, 64, 6, 2, 19, 700};
    const head_rotation how = {64, 20, true};
    std::vector<uint32_t> shuffled(s.n_kv), turned(s.n_kv);
    for (uint32_t i = 0; i < s.n_kv; ++i) {
        shuffled[i] = i;
        turned[i] = (i + 450) % s.n_kv; // as a ring of cells
    }
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    for (const std::vector<uint32_t> & order : {shuffled, turned}) {
        std::vector<uint32_t> of_column(s.n_kv), of_cell(s.n_kv);
        for (uint32_t i = 0; i < s.n_kv; ++i) {
            of_column[i] = of_cell[order[i]] = i / 50 % 3;
        }
        std::vector<float> tables(4 * how.n_pairs, std::sqrt(0.5f));
        for (const auto & [type, old_type] :
             {std::pair{GGML_TYPE_F16, GGML_TYPE_F16}, std::pair{GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}}) {
            const attention_problem p(s, type, 0.7, random);
            const rows_of_type old_k(old_type, s.head_dim_k, s, random), old_v(old_type, s.head_dim_v, s, random);
            for_each_kernel([&, type = type](const cpu_kernels & kernel) {
                std::vector<float> expected(p.out_floats()), found(p.out_floats());
                std::vector<float> expected_shares(s.n_kv), shares(s.n_kv);
                attend_job job = job_of(p, expected);
                job.waiting = {of_column.data(), tables.data(), how, 0};
                run(kernel, job, 3, expected_shares.data());
                const rows_of_type k = moved(p.k, order), v = moved(p.v, order);
                job.k = k.rows();
                job.v = v.rows();
                job.out = found.data();
                job.order = order.data();
                job.waiting.of_cell = of_cell.data();
                run(kernel, job, 3, shares.data());
                CHECK(same_bits(found, expected.data()));
                CHECK(same_bits(shares, expected_shares.data()));
                // cells from one on are old: as if each row had its own type
                rows_of_type mixed_k(GGML_TYPE_F32, s.head_dim_k, s, random), mixed_v(GGML_TYPE_F32, s.head_dim_v, s, random);
                const uint32_t n_fresh = 300;
                const size_t width = size_t{s.n_head_kv} * s.head_dim_k;
                for (uint32_t i = 0; i < s.n_kv; ++i) {
                    const bool old = order[i] >= n_fresh;
                    const size_t row = (old ? order[i] : i) * width;
                    memcpy(&mixed_k.raw[i * mixed_k.stride], &(old ? old_k : p.k).values[row], width * sizeof(float));
                    memcpy(&mixed_v.raw[i * mixed_v.stride], &(old ? old_v : p.v).values[row], width * sizeof(float));
                }
                job.old_k = old_k.rows();
                job.old_v = old_v.rows();
                job.n_fresh = n_fresh;
                run(kernel, job, 3);
                attend_job mixed = job_of(p, expected);
                mixed.waiting = {of_column.data(), tables.data(), how, 0};
                mixed.k = mixed_k.rows();
                mixed.v = mixed_v.rows();
                run(kernel, mixed, 3);
                CHECK(same_bits(found, expected.data()));
            });
        }
    }
}
