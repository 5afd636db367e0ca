#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/kernel.h"

using namespace kvg;

namespace {

std::vector<float> random_floats(size_t n, std::mt19937 & random, float scale = 1.0f) {
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> x(n);
    for (float & each : x) {
        each = normal(random);
    }
    return x;
}

double nmse(const std::vector<float> & got, const std::vector<double> & wanted) {
    double error = 0;
    double size = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
        error += (got[i] - wanted[i]) * (got[i] - wanted[i]);
        size += wanted[i] * wanted[i];
    }
    return error / size;
}

// Two sequences, tokens of both in turn: the first begins with nothing, the second with a state.
struct two_sequences {
    static constexpr uint32_t N_TOKENS = 11;
    std::vector<uint32_t> first{0, 2, 3, 6, 7, 10};
    std::vector<uint32_t> second{1, 4, 5, 8, 9};
    std::vector<float> before;
    std::vector<float> after_first;
    std::vector<float> after_second;
    std::vector<float> kept; // of the second, after its third token
    std::vector<float *> where;
    std::vector<recur_run> runs;

    two_sequences(size_t n_floats, std::mt19937 & random)
        : before(random_floats(n_floats, random)), after_first(n_floats), after_second(n_floats), kept(n_floats),
          where{nullptr, nullptr, kept.data(), nullptr, nullptr} {
        runs = {{nullptr, after_first.data(), first.data(), 6, nullptr},
                {before.data(), after_second.data(), second.data(), 5, where.data()}};
    }
};

void check_convolution(const cpu_kernels & kernel, uint32_t n_taps, uint32_t n_channels, bool silu, bool biased) {
    std::mt19937 random(n_taps + n_channels);
    const uint32_t offset = 3;
    const uint32_t n_past = n_taps - 1;
    two_sequences s(offset + size_t{n_past} * n_channels, random);
    const uint32_t stride = n_channels + 5;
    const auto x = random_floats(size_t{stride} * s.N_TOKENS, random);
    const auto taps = random_floats(size_t{n_taps} * n_channels, random);
    const auto bias = random_floats(n_channels, random);
    std::vector<float> out(size_t{n_channels} * s.N_TOKENS);
    const convolve_job job = {{s.runs.data(), 2, offset},
                              {x.data(), stride},
                              taps.data(),
                              biased ? bias.data() : nullptr,
                              out.data(),
                              n_taps,
                              n_channels,
                              silu};
    const uint32_t half = n_channels / 2 / kernel.lanes * kernel.lanes;
    kernel.recur.convolve(job, half, n_channels);
    kernel.recur.convolve(job, 0, half);

    std::vector<double> wanted(out.size());
    for (const recur_run & run : s.runs) {
        for (uint32_t c = 0; c < n_channels; ++c) {
            std::vector<double> seen(n_past);
            for (uint32_t i = 0; run.from && i < n_past; ++i) {
                seen[i] = run.from[offset + i * n_channels + c];
            }
            for (uint32_t t = 0; t < run.n; ++t) {
                seen.push_back(x[size_t{run.tokens[t]} * stride + c]);
                double sum = biased ? bias[c] : 0;
                for (uint32_t i = 0; i < n_taps; ++i) {
                    sum += seen[t + i] * taps[size_t{c} * n_taps + i];
                }
                wanted[size_t{run.tokens[t]} * n_channels + c] = silu ? sum / (1 + std::exp(-sum)) : sum;
            }
            for (uint32_t i = 0; i < n_past; ++i) {
                CHECK(run.to[offset + i * n_channels + c] == static_cast<float>(seen[run.n + i]));
                if (run.after) {
                    CHECK(s.kept[offset + i * n_channels + c] == static_cast<float>(seen[3 + i]));
                }
            }
        }
    }
    CHECK(nmse(out, wanted) < 1e-12);
}

struct recurrence {
    uint32_t head_dim_k, head_dim_v, n_head, n_head_k;
    bool in_turn, delta, by_width;
};

void check_recurrence(const cpu_kernels & kernel, const recurrence & r) {
    std::mt19937 random(r.head_dim_k + r.n_head);
    const uint32_t offset = 7;
    const uint32_t width = r.head_dim_k;
    two_sequences s(offset + size_t{r.n_head} * r.head_dim_v * width, random);
    const uint32_t n = s.N_TOKENS;
    const uint32_t k_stride = r.n_head_k * width + 3;
    const uint32_t v_stride = r.n_head * r.head_dim_v + 1;
    const uint32_t decay_stride = r.n_head * (r.by_width ? width : 1);
    const float size = 1.0f / std::sqrt(static_cast<float>(width));
    const auto q = random_floats(size_t{k_stride} * n, random, size);
    const auto k = random_floats(size_t{k_stride} * n, random, size);
    const auto v = random_floats(size_t{v_stride} * n, random);
    auto decay = random_floats(size_t{decay_stride} * n, random);
    for (float & each : decay) {
        each = -std::fabs(each);
    }
    const auto beta = random_floats(size_t{r.n_head} * n, random);
    std::vector<float> out(size_t{r.n_head} * r.head_dim_v * n);
    const recall_job job = {{s.runs.data(), 2, offset},
                            {q.data(), k_stride},
                            {k.data(), k_stride},
                            {v.data(), v_stride},
                            {decay.data(), decay_stride},
                            {beta.data(), r.n_head},
                            out.data(),
                            0.5f,
                            width,
                            r.head_dim_v,
                            r.n_head,
                            r.n_head_k,
                            r.in_turn,
                            r.delta,
                            r.by_width};
    const uint32_t n_units = r.n_head * r.head_dim_v / RECUR_ROWS;
    kernel.recur.recall(job, n_units / 3, n_units);
    kernel.recur.recall(job, 0, n_units / 3);

    std::vector<double> wanted(out.size());
    std::vector<double> states_wanted, states_got, kept_wanted;
    std::vector<float> states, kept;
    for (const recur_run & run : s.runs) {
        for (uint32_t h = 0; h < r.n_head; ++h) {
            const uint32_t hk = r.in_turn ? h % r.n_head_k : h / (r.n_head / r.n_head_k);
            for (uint32_t row = 0; row < r.head_dim_v; ++row) {
                const size_t at = offset + (size_t{h} * r.head_dim_v + row) * width;
                std::vector<double> state(width);
                for (uint32_t i = 0; run.from && i < width; ++i) {
                    state[i] = run.from[at + i];
                }
                for (uint32_t t = 0; t < run.n; ++t) {
                    const uint32_t token = run.tokens[t];
                    const float * key = k.data() + size_t{token} * k_stride + hk * width;
                    const float * query = q.data() + size_t{token} * k_stride + hk * width;
                    double recalled = 0;
                    for (uint32_t i = 0; i < width; ++i) {
                        const float d = decay[size_t{token} * decay_stride + (r.by_width ? h * width + i : h)];
                        state[i] *= std::exp(static_cast<double>(d));
                        recalled += state[i] * key[i];
                    }
                    const double value = v[size_t{token} * v_stride + h * r.head_dim_v + row];
                    const double added = (value - (r.delta ? recalled : 0)) * beta[size_t{token} * r.n_head + h];
                    double result = 0;
                    for (uint32_t i = 0; i < width; ++i) {
                        state[i] += added * key[i];
                        result += state[i] * query[i];
                    }
                    wanted[(size_t{token} * r.n_head + h) * r.head_dim_v + row] = result * 0.5;
                    if (run.after && t == 2) {
                        kept_wanted.insert(kept_wanted.end(), state.begin(), state.end());
                        kept.insert(kept.end(), s.kept.begin() + at, s.kept.begin() + at + width);
                    }
                }
                states_wanted.insert(states_wanted.end(), state.begin(), state.end());
                states.insert(states.end(), run.to + at, run.to + at + width);
            }
        }
    }
    CHECK(nmse(out, wanted) < 1e-11);
    CHECK(nmse(states, states_wanted) < 1e-11);
    CHECK(nmse(kept, kept_wanted) < 1e-11);
}

} // namespace

TEST_CASE("a short convolution goes on from the inputs before, for sequences beside each other") {
    for (const cpu_kernels * const * kernel = kernels_here(); *kernel; ++kernel) {
        CAPTURE((*kernel)->name);
        check_convolution(**kernel, 4, 64, true, false);
        check_convolution(**kernel, 3, 48, false, true);
        check_convolution(**kernel, 2, 16, true, true);
        check_convolution(**kernel, RECUR_TAPS, 32, false, false);
    }
}

TEST_CASE("linear attention gives what its recurrence says, for sequences beside each other") {
    for (const cpu_kernels * const * kernel = kernels_here(); *kernel; ++kernel) {
        CAPTURE((*kernel)->name);
        check_recurrence(**kernel, {128, 128, 4, 2, true, true, false});
        check_recurrence(**kernel, {64, 64, 6, 2, false, true, false});
        check_recurrence(**kernel, {128, 32, 4, 1, false, false, false});
        check_recurrence(**kernel, {16, 8, 3, 3, true, true, true});
    }
}

TEST_CASE("vectors fit every width that is a multiple of 4") {
    for (const uint32_t width : {4u, 12u, 24u, 64u, 4092u}) {
        CHECK(width % kernels_for_width(width).lanes == 0);
    }
}
