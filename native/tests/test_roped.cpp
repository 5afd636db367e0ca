#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "backends.h"
#include "device.h"
#include "graph/roped.h"
#include "host_memory.h"
#include "model/rope.h"
#include "team.h"

using namespace kvg;

namespace {

constexpr int64_t HEAD_DIM = 80;
constexpr int64_t N_HEADS = 3;

struct rotation {
    rope_params params;
    std::vector<float> factors = {}; // of pairs, or none
};

rope_params params_of(int mode, int n_rot) { return {mode, n_rot, 0, 4096, 10000.0f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f, false}; }

// Heads of tokens at these positions: as ours rotate them, or as ggml's operation does. in_rows: heads are a part of wider rows
std::vector<float> rotated(const rotation & r, const std::vector<int32_t> & positions, const std::vector<float> & x,
                           bool is_ours, bool in_rows, int n_threads = 1) {
    backends here({cpu_device()});
    here.set_threads(1);
    const team_share share(n_threads);
    const auto n = static_cast<int64_t>(positions.size());
    ggml_context_ptr ctx = new_ggml_context(16 * ggml_tensor_overhead() + ggml_graph_overhead());
    ggml_tensor * rows = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, HEAD_DIM * N_HEADS * (in_rows ? 2 : 1), n);
    ggml_tensor * at = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, n);
    ggml_tensor * factors =
        r.factors.empty() ? nullptr : ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, static_cast<int64_t>(r.factors.size()));
    ggml_tensor * heads = ggml_view_3d(ctx.get(), rows, HEAD_DIM, N_HEADS, n, HEAD_DIM * sizeof(float), rows->nb[1],
                                       in_rows ? HEAD_DIM * sizeof(float) : 0);
    CHECK(is_roped_here(heads, r.params));
    ggml_tensor * out = is_ours ? roped(ctx.get(), heads, rope_table(ctx.get(), at, factors, r.params), r.params)
                                : rope(ctx.get(), heads, at, factors, r.params, false, first_gain(r.params));
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, out);
    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), here.cpu()));
    ggml_backend_tensor_set(rows, x.data(), 0, ggml_nbytes(rows));
    ggml_backend_tensor_set(at, positions.data(), 0, ggml_nbytes(at));
    if (factors) {
        ggml_backend_tensor_set(factors, r.factors.data(), 0, ggml_nbytes(factors));
    }
    REQUIRE(ggml_backend_graph_compute(here.cpu(), graph) == GGML_STATUS_SUCCESS);
    std::vector<float> got(static_cast<size_t>(ggml_nelements(out)));
    ggml_backend_tensor_get(out, got.data(), 0, got.size() * sizeof(float));
    return got;
}

std::vector<float> random_rows(size_t n) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> x(n);
    for (float & each : x) {
        each = normal(random);
    }
    return x;
}

std::vector<rotation> rotations() {
    std::vector<rotation> all;
    for (const int mode : {GGML_ROPE_TYPE_NORMAL, GGML_ROPE_TYPE_NEOX}) {
        for (const int n_rot : {80, 64, 2}) {
            all.push_back({params_of(mode, n_rot)});
        }
        rotation with_factors = {params_of(mode, 64), std::vector<float>(32)};
        for (size_t i = 0; i < with_factors.factors.size(); ++i) {
            with_factors.factors[i] = 1.0f + static_cast<float>(i) / 8;
        }
        all.push_back(with_factors);
        rotation yarn = {params_of(mode, 80)};
        yarn.params.freq_scale = 0.25f;
        yarn.params.yarn = 1.0f;
        yarn.params.attn_factor = 0.8f;
        all.push_back(yarn);
        rotation linear = {params_of(mode, 32)};
        linear.params.freq_scale = 0.125f;
        linear.params.freq_base = 500000.0f;
        linear.params.offset = 40;
        all.push_back(linear);
    }
    return all;
}

} // namespace

TEST_CASE("heads are rotated as ggml rotates them") {
    const std::vector<int32_t> positions = {0, 1, 2, 1000, 7, 31999};
    for (const rotation & r : rotations()) {
        CAPTURE(r.params.mode);
        CAPTURE(r.params.n_rot);
        CAPTURE(r.params.yarn);
        for (const bool in_rows : {false, true}) {
            const std::vector<float> x = random_rows(positions.size() * HEAD_DIM * N_HEADS * (in_rows ? 2 : 1));
            const std::vector<float> ours = rotated(r, positions, x, true, in_rows);
            const std::vector<float> ggmls = rotated(r, positions, x, false, in_rows);
            REQUIRE(ours.size() == ggmls.size());
            for (size_t i = 0; i < ours.size(); ++i) {
                CHECK(std::fabs(ours[i] - ggmls[i]) <= 1e-6f);
            }
        }
    }
}

TEST_CASE("how a token is rotated depends on no other token, and on no number of threads") {
    const rotation r = {params_of(GGML_ROPE_TYPE_NEOX, 64)};
    const size_t row = HEAD_DIM * N_HEADS;
    std::vector<int32_t> positions(300);
    for (size_t t = 0; t < positions.size(); ++t) {
        positions[t] = static_cast<int32_t>(t * 7 % 501);
    }
    const std::vector<float> x = random_rows(positions.size() * row);
    const std::vector<float> all = rotated(r, positions, x, true, false);
    CHECK(rotated(r, positions, x, true, false, 3) == all);
    for (const size_t t : {size_t{0}, size_t{150}, size_t{299}}) {
        const std::vector<float> own(&x[t * row], &x[t * row] + row);
        CHECK(memcmp(rotated(r, {positions[t]}, own, true, false).data(), &all[t * row], row * sizeof(float)) == 0);
    }
}

TEST_CASE("other pairs than neighbours and halves are left to ggml, and so are other numbers") {
    ggml_context_ptr ctx = new_ggml_context(4 * ggml_tensor_overhead());
    ggml_tensor * floats = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, 64, 2, 3);
    ggml_tensor * halves = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, 64, 2, 3);
    CHECK(is_roped_here(floats, params_of(GGML_ROPE_TYPE_NORMAL, 64)));
    CHECK(!is_roped_here(floats, params_of(GGML_ROPE_TYPE_MROPE, 64)));
    CHECK(!is_roped_here(halves, params_of(GGML_ROPE_TYPE_NORMAL, 64)));
}
