#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "backends.h"
#include "device.h"
#include "graph/rms_norm.h"
#include "host_memory.h"
#include "random_floats.h"
#include "team.h"

using namespace kvg;

namespace {

constexpr int64_t N = 96;
constexpr int64_t N_HEADS = 5;
constexpr float EPS = 1e-6f;

// The heads of all tokens, each beside one that isn't normed.
std::vector<float> normed(const std::vector<float> & x, const std::vector<float> & weight, int of_team, int of_ggml) {
    backends backends({cpu_device()});
    backends.set_threads(of_ggml);
    const team_share team(of_team);
    ggml_context_ptr ctx = new_ggml_context(16 * ggml_tensor_overhead() + ggml_graph_overhead());
    const auto n_tokens = static_cast<int64_t>(x.size()) / (2 * N * N_HEADS);
    ggml_tensor * rows = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, 2 * N, N_HEADS, n_tokens);
    ggml_tensor * weights = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, N);
    ggml_tensor * heads = ggml_view_3d(ctx.get(), rows, N, N_HEADS, n_tokens, rows->nb[1], rows->nb[2], 0);
    CHECK_FALSE(is_normed_here(heads, weights)); // nobody knows where the weight is
    const ggml_backend_buffer_ptr leafs(ggml_backend_alloc_ctx_tensors(ctx.get(), backends.cpu()));
    CHECK(is_normed_here(heads, weights));
    CHECK_FALSE(is_normed_here(rows, weights));
    ggml_backend_tensor_set(rows, x.data(), 0, ggml_nbytes(rows));
    ggml_backend_tensor_set(weights, weight.data(), 0, ggml_nbytes(weights));
    ggml_tensor * y = rms_norm(ctx.get(), heads, weights, EPS);
    CHECK(is_rms_norm(y));
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, y);
    const ggml_backend_buffer_ptr nodes(ggml_backend_alloc_ctx_tensors(ctx.get(), backends.cpu()));
    REQUIRE(ggml_backend_graph_compute(backends.cpu(), graph) == GGML_STATUS_SUCCESS);
    std::vector<float> out(static_cast<size_t>(ggml_nelements(y)));
    ggml_backend_tensor_get(y, out.data(), 0, ggml_nbytes(y));
    return out;
}

} // namespace

TEST_CASE("heads are normed as F64 does it, the same for a token alone and by any number of threads") {
    const size_t n_tokens = 70;
    const size_t of_token = 2 * N * N_HEADS;
    const std::vector<float> x = random_floats(n_tokens * of_token, 1);
    const std::vector<float> weight = random_floats(N, 2);
    const std::vector<float> all = normed(x, weight, 1, 1);
    double worst = 0;
    for (size_t head = 0; head < n_tokens * N_HEADS; ++head) {
        const float * row = &x[head * 2 * N];
        double sum = 0;
        for (size_t i = 0; i < N; ++i) {
            sum += double{row[i]} * row[i];
        }
        for (size_t i = 0; i < N; ++i) {
            const double wanted = row[i] / std::sqrt(sum / N + double{EPS}) * weight[i];
            worst = std::fmax(worst, std::fabs(all[head * N + i] - wanted) / (std::fabs(wanted) + 1e-6));
        }
    }
    CHECK(worst < 1e-6);
    for (const auto & [of_team, of_ggml] : {std::pair{2, 1}, {3, 1}, {1, 3}}) {
        CHECK(normed(x, weight, of_team, of_ggml) == all);
    }
    const auto last = static_cast<ptrdiff_t>((n_tokens - 1) * of_token);
    CHECK(normed({x.begin() + last, x.end()}, weight, 1, 1) == std::vector<float>(all.end() - N * N_HEADS, all.end()));
}
