// Problems as jobs of the kernels, for every instruction set that this machine has.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "naive_attention.h"

namespace kvg {

inline attend_job job_of(const attention_problem & p, std::vector<float> & out) {
    attend_job job = {};
    job.q = p.q.data();
    job.k = p.k.rows();
    job.v = p.v.rows();
    job.mask = p.mask.data();
    job.sinks = p.sinks.empty() ? nullptr : p.sinks.data();
    job.out = out.data();
    job.scale = p.scale;
    job.soft_cap = p.soft_cap;
    job.slopes = p.slopes.empty() ? nullptr : p.slopes.data();
    job.cell_positions = p.cell_positions.data();
    job.token_positions = p.token_positions.data();
    job.head_dim_k = p.s.head_dim_k;
    job.head_dim_v = p.s.head_dim_v;
    job.n_head = p.s.n_head;
    job.n_head_kv = p.s.n_head_kv;
    job.n_tokens = p.s.n_tokens;
    job.n_kv = p.s.n_kv;
    return job;
}

// (n_tokens, n_ranges + 1): ranges cut anywhere, for each token elsewhere
inline std::vector<uint32_t> any_ranges(const attend_job & job, uint32_t n_ranges) {
    std::vector<uint32_t> begins(size_t{job.n_tokens} * (n_ranges + 1), job.n_kv);
    for (uint32_t r = 0; r < n_ranges; ++r) {
        for (uint32_t t = 0; t < job.n_tokens; ++t) {
            begins[r * job.n_tokens + t] = r == 0 ? 0 : std::min(job.n_kv, job.n_kv * r / n_ranges + 7 * t);
        }
    }
    return begins;
}

// Each range by itself, then added up. shares: (n_kv), to which what cells get is added in the end; nullptr: it isn't asked for
inline void run(const cpu_kernels & kernel, attend_job job, uint32_t n_ranges, float * shares = nullptr) {
    const std::vector<uint32_t> begins = any_ranges(job, n_ranges);
    const uint32_t group = job.n_head / job.n_head_kv;
    const size_t floats = size_t{job.n_tokens} * group * attend_partial_floats(job.head_dim_v);
    std::vector<float> scratch(attend_scratch_floats(job.head_dim_k, job.head_dim_v, group));
    std::vector<float> partial(floats), added(floats);
    const uint32_t half = job.n_tokens / 2; // tokens in two units
    for (uint32_t head_kv = 0; head_kv < job.n_head_kv; ++head_kv) {
        for (const auto & [begin, end] : {std::pair{0u, half}, std::pair{half, job.n_tokens}}) {
            job.range_begins = begins.data();
            kernel.attend.run(job, {begin, end, head_kv, 0, 1}, partial.data(), scratch.data());
            for (uint32_t r = 1; r < n_ranges; ++r) {
                kernel.attend.run(job, {begin, end, head_kv, r, r + 1}, added.data(), scratch.data());
                kernel.attend.add(job, {begin, end, head_kv, 0, 1}, partial.data(), added.data());
            }
            kernel.attend.finish(job, {begin, end, head_kv, 0, 1}, partial.data());
            if (shares && begin < end) {
                job.range_begins = nullptr;
                job.shares = shares;
                kernel.attend.run(job, {begin, end, head_kv, 0, 1}, partial.data(), scratch.data());
                job.shares = nullptr;
            }
        }
    }
}

inline std::vector<float> with_kernel(const cpu_kernels & kernel, const attention_problem & p, uint32_t n_ranges,
                                      const attend_rotations & waiting = {}) {
    std::vector<float> out(p.out_floats(), std::numeric_limits<float>::quiet_NaN());
    attend_job job = job_of(p, out);
    job.waiting = waiting;
    run(kernel, job, n_ranges);
    return out;
}

template <class F> void for_each_kernel(F test) {
    for (const cpu_kernels * const * kernel = kernels_here(); *kernel; ++kernel) {
        CAPTURE(std::string((*kernel)->name));
        test(**kernel);
    }
}

inline bool fits(ggml_type type, const attention_sizes & s) {
    return s.head_dim_k % ggml_blck_size(type) == 0 && s.head_dim_v % ggml_blck_size(type) == 0;
}

} // namespace kvg
