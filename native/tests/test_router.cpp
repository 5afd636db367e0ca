#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "backends.h"
#include "device.h"
#include "graph/router.h"
#include "host_memory.h"
#include "team.h"

using namespace kvg;

namespace {

constexpr uint32_t N_IN = 64;

struct routing {
    std::vector<float> scores;    // (n_expert, n_tokens)
    std::vector<int32_t> experts; // (n_used, n_tokens)
    std::vector<float> weights;
};

// A router, with a bias, whose tokens are rows of x.
struct router {
    uint32_t n_expert;
    feed_forward_spec spec = {};
    std::vector<float> matrix;
    std::vector<float> bias;

    router(uint32_t n_expert, uint32_t n_used) : n_expert(n_expert), matrix(N_IN * n_expert), bias(n_expert) {
        std::mt19937 random(n_expert);
        std::normal_distribution<float> normal(0, 0.2f);
        std::generate(matrix.begin(), matrix.end(), [&] { return normal(random); });
        std::generate(bias.begin(), bias.end(), [&] { return normal(random); });
        spec.n_expert = n_expert;
        spec.n_expert_used = n_used;
    }
    routing run(std::vector<float> x, int n_threads) const {
        backends here({cpu_device()});
        here.set_threads(n_threads);
        const auto n = static_cast<int64_t>(x.size() / N_IN);
        ggml_context_ptr ctx = new_ggml_context(16 * ggml_tensor_overhead() + ggml_graph_overhead());
        ggml_tensor * weight = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, N_IN, n_expert);
        ggml_tensor * added = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n_expert);
        ggml_tensor * rows = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, N_IN, n);
        ggml_tensor * scores = expert_scores(ctx.get(), weight, added, rows);
        ggml_tensor * experts = best_experts(ctx.get(), scores, spec.n_expert_used);
        ggml_tensor * weights = weights_of_experts(ctx.get(), scores, experts, spec);
        ggml_cgraph * graph = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(graph, weights);
        const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), here.cpu()));
        CHECK(is_router_here(weight, rows));
        CHECK(is_expert_scores(scores));
        CHECK(!is_expert_scores(experts));
        ggml_backend_tensor_set(weight, matrix.data(), 0, ggml_nbytes(weight));
        ggml_backend_tensor_set(added, bias.data(), 0, ggml_nbytes(added));
        ggml_backend_tensor_set(rows, x.data(), 0, ggml_nbytes(rows));
        REQUIRE(ggml_backend_graph_compute(here.cpu(), graph) == GGML_STATUS_SUCCESS);
        const auto read = [](auto & to, ggml_tensor * from) {
            to.resize(static_cast<size_t>(ggml_nelements(from)));
            ggml_backend_tensor_get(from, to.data(), 0, ggml_nbytes(from));
        };
        routing result;
        read(result.scores, scores);
        read(result.experts, experts);
        read(result.weights, weights);
        return result;
    }
};

std::vector<float> random_rows(int n) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(n) * N_IN);
    std::generate(x.begin(), x.end(), [&] { return normal(random); });
    return x;
}

template <class F> void for_each_gating(F test) {
    for (const gating_kind gating : {gating_kind::softmax, gating_kind::softmax_of_chosen}) {
        for (const bool sums_to_1 : {false, true}) {
            for (const float scale : {0.0f, 2.5f}) {
                test(gating, sums_to_1, scale);
            }
        }
    }
}

} // namespace

TEST_CASE("each token goes to the experts with the highest scores, by the weights that F64 gives them") {
    for_each_gating([](gating_kind gating, bool sums_to_1, float scale) {
        for (const auto & [n_expert, n_used] : {std::pair<uint32_t, uint32_t>{2, 1}, {8, 8}, {128, 6}}) {
            router of(n_expert, n_used);
            of.spec.gating = gating;
            of.spec.sums_to_1 = sums_to_1;
            of.spec.expert_scale = scale;
            const routing got = of.run(random_rows(9), 1);
            for (size_t t = 0; t < 9; ++t) {
                const float * scores = &got.scores[t * n_expert];
                std::vector<int32_t> order(n_expert);
                std::iota(order.begin(), order.end(), 0);
                std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
                double all = 0;
                double chosen = 0;
                for (uint32_t i = 0; i < n_expert; ++i) {
                    const double e = std::exp(double{scores[order[i]]});
                    all += e;
                    chosen += i < n_used ? e : 0;
                }
                const bool by_chosen = gating == gating_kind::softmax_of_chosen || sums_to_1;
                for (uint32_t i = 0; i < n_used; ++i) {
                    CHECK(got.experts[t * n_used + i] == order[i]);
                    const double weight = std::exp(double{scores[order[i]]}) / (by_chosen ? chosen : all);
                    CHECK(got.weights[t * n_used + i] == doctest::Approx(weight * (scale > 0 ? scale : 1)).epsilon(1e-5));
                }
            }
        }
    });
}

TEST_CASE("what a token gets depends neither on other tokens nor on the number of threads, to the last bit") {
    const router of(128, 8);
    const std::vector<float> x = random_rows(300);
    const routing all = of.run(x, 1);
    const auto same = [](const auto & a, const auto & b, size_t from, size_t n) {
        return memcmp(a.data(), &b[from], n * sizeof(a[0])) == 0;
    };
    for (const int n_threads : {1, 2, 5}) {
        const team_share team(n_threads);
        const routing again = of.run(x, n_threads == 5 ? 3 : 1);
        CHECK(same(again.scores, all.scores, 0, all.scores.size()));
        CHECK(same(again.experts, all.experts, 0, all.experts.size()));
        CHECK(same(again.weights, all.weights, 0, all.weights.size()));
        for (const size_t t : {0, 17, 299}) {
            const routing alone = of.run({&x[t * N_IN], &x[t * N_IN] + N_IN}, 1);
            CHECK(same(alone.scores, all.scores, t * 128, 128));
            CHECK(same(alone.experts, all.experts, t * 8, 8));
            CHECK(same(alone.weights, all.weights, t * 8, 8));
        }
    }
}

TEST_CASE("of equal scores the first experts are chosen, and of NaN as many different ones") {
    router of(32, 5);
    of.matrix.assign(of.matrix.size(), 0.0f);
    for (const float each : {1.0f, std::numeric_limits<float>::quiet_NaN()}) {
        of.bias.assign(32, each);
        const routing got = of.run(random_rows(2), 1);
        for (size_t t = 0; t < 2; ++t) {
            const std::set<int32_t> chosen(got.experts.begin() + t * 5, got.experts.begin() + (t + 1) * 5);
            CHECK(chosen == std::set<int32_t>{0, 1, 2, 3, 4});
        }
    }
}
