#include <doctest/doctest.h>

#include <algorithm>
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

// Inputs of tokens, and what they do to states.
struct tokens_of {
    recurrence r;
    uint32_t n, k_stride, v_stride, decay_stride;
    std::vector<float> q, k, v, decay, beta, skip, out;
    std::vector<double> wanted; // of out

    tokens_of(const recurrence & r, uint32_t n, std::mt19937 & random)
        : r(r), n(n), k_stride(r.n_head_k * r.head_dim_k + 3), v_stride(r.n_head * r.head_dim_v + 1),
          decay_stride(r.n_head * (r.by_width ? r.head_dim_k : 1)), out(size_t{r.n_head} * r.head_dim_v * n),
          wanted(out.size()) {
        const float size = 1.0f / std::sqrt(static_cast<float>(r.head_dim_k));
        q = random_floats(size_t{k_stride} * n, random, size);
        k = random_floats(size_t{k_stride} * n, random, size);
        v = random_floats(size_t{v_stride} * n, random);
        decay = random_floats(size_t{decay_stride} * n, random);
        for (float & each : decay) {
            each = -each * each * each * each; // most leave nearly all, some nearly nothing
        }
        beta = random_floats(size_t{r.n_head} * n, random);
        for (float & each : beta) {
            each = 1.0f / (1.0f + std::exp(-each));
        }
        skip = random_floats(r.delta ? 0 : r.n_head, random);
    }
    uint32_t width() const { return r.head_dim_k; }
    size_t state_floats() const { return size_t{r.n_head} * r.head_dim_v * width(); }

    recall_job job(const std::vector<recur_run> & runs, uint32_t offset) {
        return {{runs.data(), static_cast<uint32_t>(runs.size()), offset},
                {q.data(), k_stride},
                {k.data(), k_stride},
                {v.data(), v_stride},
                {decay.data(), decay_stride},
                {beta.data(), r.n_head},
                skip.empty() ? nullptr : skip.data(),
                out.data(),
                0.5f,
                width(),
                r.head_dim_v,
                r.n_head,
                r.n_head_k,
                r.in_turn,
                r.delta,
                r.by_width};
    }

    // One token after the other. state: (head_dim_k, head_dim_v, n_head)
    void advance(std::vector<double> & state, uint32_t token) {
        for (uint32_t h = 0; h < r.n_head; ++h) {
            const uint32_t hk = r.in_turn ? h % r.n_head_k : h / (r.n_head / r.n_head_k);
            const float * key = k.data() + size_t{token} * k_stride + hk * width();
            const float * query = q.data() + size_t{token} * k_stride + hk * width();
            for (uint32_t row = 0; row < r.head_dim_v; ++row) {
                double * s = state.data() + (size_t{h} * r.head_dim_v + row) * width();
                double recalled = 0;
                for (uint32_t i = 0; i < width(); ++i) {
                    const float d = decay[size_t{token} * decay_stride + (r.by_width ? h * width() + i : h)];
                    s[i] *= std::exp(static_cast<double>(d));
                    recalled += s[i] * key[i];
                }
                const double value = v[size_t{token} * v_stride + h * r.head_dim_v + row];
                const double added = (value - (r.delta ? recalled : 0)) * beta[size_t{token} * r.n_head + h];
                double result = 0;
                for (uint32_t i = 0; i < width(); ++i) {
                    s[i] += added * key[i];
                    result += s[i] * query[i];
                }
                wanted[(size_t{token} * r.n_head + h) * r.head_dim_v + row] =
                    result * 0.5 + (skip.empty() ? 0 : value * skip[h]);
            }
        }
    }
};

void check_recurrence(const cpu_kernels & kernel, const recurrence & r) {
    std::mt19937 random(r.head_dim_k + r.n_head);
    const uint32_t offset = 7;
    tokens_of x(r, two_sequences::N_TOKENS, random);
    two_sequences s(offset + x.state_floats(), random);
    const recall_job job = x.job(s.runs, offset);
    const uint32_t n_units = r.n_head * r.head_dim_v / RECUR_ROWS;
    kernel.recur.recall(job, n_units / 3, n_units);
    kernel.recur.recall(job, 0, n_units / 3);

    for (const recur_run & run : s.runs) {
        std::vector<double> state(x.state_floats());
        if (run.from) {
            state.assign(run.from + offset, run.from + offset + state.size());
        }
        for (uint32_t t = 0; t < run.n; ++t) {
            x.advance(state, run.tokens[t]);
            if (run.after && run.after[t]) {
                CHECK(nmse({run.after[t] + offset, run.after[t] + offset + state.size()}, state) < 1e-11);
            }
        }
        CHECK(nmse({run.to + offset, run.to + offset + state.size()}, state) < 1e-11);
    }
    CHECK(nmse(x.out, x.wanted) < 1e-11);
}

// Three sequences, tokens of the first two in turn: a long one without a state before, whose state the third goes on from with some tokens,
// and one whose state is replaced, and kept behind some tokens.
struct long_runs {
    static constexpr uint32_t N_FIRST = 77, N_SECOND = 50, N_THIRD = 3, N_TOKENS = N_FIRST + N_SECOND + N_THIRD;
    std::vector<uint32_t> tokens[3];
    std::vector<float> states[3], kept[2];
    std::vector<float *> after;
    std::vector<recur_run> runs;

    long_runs(size_t n_floats, std::mt19937 & random) : after(N_SECOND) {
        for (uint32_t i = 0; i < N_TOKENS; ++i) {
            tokens[i >= N_FIRST + N_SECOND ? 2 : i % 2 == 1 && i / 2 < N_SECOND ? 1 : 0].push_back(i);
        }
        for (auto & each : states) {
            each = random_floats(n_floats, random);
        }
        kept[0] = kept[1] = std::vector<float>(n_floats);
        after[20] = kept[0].data();
        after[48] = kept[1].data();
        runs = {{nullptr, states[0].data(), tokens[0].data(), N_FIRST, nullptr},
                {states[1].data(), states[1].data(), tokens[1].data(), N_SECOND, after.data()},
                {states[0].data(), states[2].data(), tokens[2].data(), N_THIRD, nullptr}};
    }
};

constexpr uint32_t OFFSET = 5; // floats of a row before the layer's own

// Results, states and those kept, all in one.
std::vector<float> by_pieces(const cpu_kernels & kernel, tokens_of & x, uint32_t n_heads, uint32_t n_rows) {
    std::mt19937 random(3);
    long_runs l(OFFSET + x.state_floats(), random);
    const recall_job job = x.job(l.runs, OFFSET);
    std::vector<float> scratch(recall_scratch_floats(x.width()));
    const uint32_t group = x.r.n_head / x.r.n_head_k;
    for (uint32_t head_k = 0; head_k < x.r.n_head_k; ++head_k) {
        for (uint32_t head = 0; head < group; head += n_heads) {
            for (uint32_t row = 0; row < x.r.head_dim_v; row += n_rows) {
                const recall_piece piece = {head_k, head, std::min(n_heads, group - head), row,
                                            std::min(row + n_rows, x.r.head_dim_v)};
                kernel.recur.recall_by_chunks(job, piece, scratch.data());
            }
        }
    }
    std::vector<float> all = x.out;
    for (const auto * each : {&l.states[0], &l.states[1], &l.states[2], &l.kept[0], &l.kept[1]}) {
        all.insert(all.end(), each->begin() + OFFSET, each->end());
    }
    return all;
}

// The same, token by token.
std::vector<double> by_tokens(tokens_of & x) {
    std::mt19937 random(3);
    const long_runs l(OFFSET + x.state_floats(), random);
    std::vector<double> states[3], kept[2];
    states[0].resize(x.state_floats());
    states[1].assign(l.states[1].begin() + OFFSET, l.states[1].end());
    for (uint32_t i = 0; i < 3; ++i) {
        states[2] = i == 2 ? states[0] : states[2];
        for (uint32_t t = 0; t < l.runs[i].n; ++t) {
            x.advance(states[i], l.tokens[i][t]);
            if (i == 1 && l.after[t]) {
                kept[t == 20 ? 0 : 1] = states[1];
            }
        }
    }
    std::vector<double> all = x.wanted;
    for (const auto * each : {&states[0], &states[1], &states[2], &kept[0], &kept[1]}) {
        all.insert(all.end(), each->begin(), each->end());
    }
    return all;
}

// Also that a piece's heads and rows make no difference to a bit of it.
void check_chunks(const cpu_kernels & kernel, const recurrence & r) {
    std::mt19937 random(r.head_dim_v + r.n_head);
    tokens_of x(r, long_runs::N_TOKENS, random);
    const std::vector<float> whole = by_pieces(kernel, x, r.n_head, r.head_dim_v);
    CHECK(nmse(whole, by_tokens(x)) < 1e-12);
    std::fill(x.out.begin(), x.out.end(), 0.0f);
    const std::vector<float> in_pieces = by_pieces(kernel, x, 1, 32);
    CHECK(whole == in_pieces);
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

TEST_CASE("what many tokens do to a state together is what they do one after the other") {
    for (const cpu_kernels * const * kernel = kernels_here(); *kernel; ++kernel) {
        CAPTURE((*kernel)->name);
        check_chunks(**kernel, {128, 128, 2, 2, true, true, false});
        check_chunks(**kernel, {64, 48, 6, 2, false, true, false});
        check_chunks(**kernel, {128, 64, 6, 1, false, false, false});
        check_chunks(**kernel, {64, 64, 2, 2, true, true, true});
        check_chunks(**kernel, {16, 16, 8, 2, true, false, false});
    }
}

TEST_CASE("a row divided by its length, and a row with a norm and a gate") {
    std::mt19937 random(1);
    for (const cpu_kernels * const * kernel = kernels_here(); *kernel; ++kernel) {
        CAPTURE((*kernel)->name);
        for (const uint32_t n : {16u, 128u, 3072u}) {
            const auto x = random_floats(n, random), gate = random_floats(n, random, 3.0f), weight = random_floats(n, random);
            std::vector<float> out(n);
            std::vector<double> wanted(x.begin(), x.end());
            const auto over_root_of = [&](double share, double eps) {
                double sum = 0;
                for (const double each : wanted) {
                    sum += each * each * share;
                }
                for (double & each : wanted) {
                    each /= std::sqrt(sum + eps);
                }
            };
            over_root_of(1, 0.5);
            (*kernel)->recur.to_unit(x.data(), out.data(), n, 0.5f);
            CHECK(nmse(out, wanted) < 1e-12);

            for (const uint32_t how : {0u, 1u, 2u, 3u}) {
                const bool silu = how % 2 == 1, gate_first = how / 2 == 1;
                const auto pass = [&] {
                    for (uint32_t i = 0; i < n; ++i) {
                        wanted[i] *= (silu ? gate[i] : 1.0) / (1 + std::exp(-static_cast<double>(gate[i])));
                    }
                };
                wanted.assign(x.begin(), x.end());
                gate_first ? pass() : void();
                over_root_of(1.0 / n, 0.5);
                gate_first ? void() : pass();
                for (uint32_t i = 0; i < n; ++i) {
                    wanted[i] *= weight[i];
                }
                (*kernel)->recur.pass_gate({x.data(), gate.data(), weight.data(), out.data(), n, 0.5f, silu, gate_first});
                CHECK(nmse(out, wanted) < 1e-12);
            }
        }
    }
}

TEST_CASE("vectors fit every width that is a multiple of 4") {
    for (const uint32_t width : {4u, 12u, 24u, 64u, 4092u}) {
        CHECK(width % kernels_for_width(width).lanes == 0);
    }
}
