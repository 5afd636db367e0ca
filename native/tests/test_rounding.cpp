#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "backends.h"
#include "device.h"
#include "graph/builder.h"
#include "graph/product.h"
#include "graph/rms_norm.h"
#include "graph/rounding.h"
#include "host_memory.h"
#include "random_floats.h"
#include "team.h"

using namespace kvg;

namespace {

constexpr int64_t N = 1312; // more than a piece, whole blocks of 32
constexpr float EPS = 1e-5f;

// Rows and what belongs to a norm of them.
struct problem {
    ggml_context_ptr ctx = new_ggml_context(64 * ggml_tensor_overhead() + ggml_graph_overhead());
    std::vector<float> x;
    std::vector<float> weight = random_floats(N, 2);
    ggml_tensor * rows;
    ggml_tensor * weights;
    std::vector<std::pair<ggml_tensor *, const std::vector<float> *>> set;

    explicit problem(std::vector<float> of) : x(std::move(of)) {
        rows = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, N, static_cast<int64_t>(x.size()) / N);
        weights = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, N);
        set = {{rows, &x}, {weights, &weight}};
    }
    ggml_tensor * normed() { return rms_norm(ctx.get(), rows, weights, EPS); }
};

const row_form & form_of_q8_0() { return product_kernel_for(GGML_TYPE_Q8_0)->form; }

struct result {
    std::vector<uint8_t> bytes;
    std::set<std::string> operations; // of ggml
    int n_nodes = 0;
};

// What `make` rounds, by a graph. There are buffers before: it is known where weights are.
template <class F> result run(problem & p, F make, int of_team = 1, int of_ggml = 1) {
    backends backends({cpu_device()});
    backends.set_threads(of_ggml);
    const team_share team(of_team);
    const ggml_backend_buffer_ptr leafs(ggml_backend_alloc_ctx_tensors(p.ctx.get(), backends.cpu()));
    for (const auto & [tensor, numbers] : p.set) {
        ggml_backend_tensor_set(tensor, numbers->data(), 0, ggml_nbytes(tensor));
    }
    ggml_tensor * rows = make();
    ggml_cgraph * graph = ggml_new_graph(p.ctx.get());
    ggml_build_forward_expand(graph, rows);
    const ggml_backend_buffer_ptr nodes(ggml_backend_alloc_ctx_tensors(p.ctx.get(), backends.cpu()));
    ggml_backend_buffer_clear(nodes.get(), 0); // bytes behind a row's last block are left as they are
    REQUIRE(ggml_backend_graph_compute(backends.cpu(), graph) == GGML_STATUS_SUCCESS);
    result result;
    result.bytes.resize(ggml_nbytes(rows));
    ggml_backend_tensor_get(rows, result.bytes.data(), 0, result.bytes.size());
    result.n_nodes = ggml_graph_n_nodes(graph);
    for (int i = 0; i < result.n_nodes; ++i) {
        result.operations.insert(ggml_op_name(ggml_graph_node(graph, i)->op));
    }
    return result;
}

// What a row of bytes stands for, by products with the unit vectors.
std::vector<float> numbers_of(const std::vector<uint8_t> & bytes) {
    std::vector<float> units(N * N);
    for (size_t i = 0; i < N; ++i) {
        units[i * N + i] = 1.0f;
    }
    std::vector<uint8_t> weights(ggml_row_size(GGML_TYPE_Q8_0, N) * N);
    ggml_quantize_chunk(GGML_TYPE_Q8_0, units.data(), weights.data(), 0, N, N, nullptr);
    const auto n_rows = static_cast<uint32_t>(bytes.size() / form_of_q8_0().bytes(N));
    std::vector<float> out(size_t{n_rows} * N);
    const product_job job = {weights.data(), ggml_row_size(GGML_TYPE_Q8_0, N), bytes.data(), out.data(), N, N, n_rows};
    product_kernel_for(GGML_TYPE_Q8_0)->run(job, 0, N / PRODUCT_TILE);
    return out;
}

// Whether rows of bytes are these numbers, rounded.
void check_rounded(const std::vector<uint8_t> & bytes, const std::vector<double> & wanted) {
    const std::vector<float> numbers = numbers_of(bytes);
    REQUIRE(numbers.size() == wanted.size());
    double worst = 0;
    for (size_t block = 0; block < numbers.size(); block += 32) {
        double most = 0;
        for (size_t i = block; i < block + 32; ++i) {
            most = std::fmax(most, std::fabs(wanted[i]));
        }
        for (size_t i = block; i < block + 32; ++i) {
            worst = std::fmax(worst, std::fabs(numbers[i] - wanted[i]) / (most / 127));
        }
    }
    CHECK(worst < 0.6); // of a step; scales are F16
}

std::vector<double> naive_norm(const problem & p) {
    std::vector<double> y(p.x.size());
    for (size_t row = 0; row < y.size(); row += N) {
        double sum = 0;
        for (size_t i = 0; i < N; ++i) {
            sum += double{p.x[row + i]} * p.x[row + i];
        }
        for (size_t i = 0; i < N; ++i) {
            y[row + i] = p.x[row + i] / std::sqrt(sum / N + double{EPS}) * p.weight[i];
        }
    }
    return y;
}

// Rows of all of them one behind the other, each by a graph of its own.
template <class F> std::vector<uint8_t> one_by_one(const std::vector<float> & x, int64_t width, F run_row) {
    std::vector<uint8_t> all;
    for (auto row = x.begin(); row < x.end(); row += width) {
        const std::vector<uint8_t> one = run_row(std::vector<float>(row, row + width));
        all.insert(all.end(), one.begin(), one.end());
    }
    return all;
}

} // namespace

TEST_CASE("rows are normed where they are rounded: F64's numbers, the same for a row alone and by any number of threads") {
    if (!product_kernel_for(GGML_TYPE_Q8_0)) {
        return;
    }
    const std::vector<float> x = random_floats(37 * N, 1);
    const auto round_norm = [](problem & p, int of_team, int of_ggml) {
        return run(p, [&] { return rounded(p.ctx.get(), p.normed(), form_of_q8_0()); }, of_team, of_ggml);
    };
    problem p(x);
    const result all = round_norm(p, 1, 1);
    CHECK(all.n_nodes == 1);
    check_rounded(all.bytes, naive_norm(p));
    for (const auto & [of_team, of_ggml] : {std::pair{2, 1}, {3, 1}, {1, 3}}) {
        problem again(x);
        CHECK(round_norm(again, of_team, of_ggml).bytes == all.bytes);
    }
    CHECK(one_by_one(x, N, [&](std::vector<float> row) {
              problem one(std::move(row));
              return round_norm(one, 1, 1).bytes;
          }) == all.bytes);
}

namespace {

// Products with a matrix of gates and one of ups, which may be one.
struct gating {
    static constexpr int64_t N_IN = 64;
    ggml_glu_op kind;
    bool are_halves;
    std::vector<float> x; // (N_IN, n_rows)

    // What the gate's node rounds, or, if plain, gates and ups as floats
    result run(bool plain, int of_team = 1, int of_ggml = 1) const {
        const int64_t n_rows = static_cast<int64_t>(x.size()) / N_IN;
        problem p{std::vector<float>(N)};
        ggml_tensor * rows = ggml_new_tensor_2d(p.ctx.get(), GGML_TYPE_F32, N_IN, n_rows);
        ggml_tensor * both = ggml_new_tensor_2d(p.ctx.get(), GGML_TYPE_Q8_0, N_IN, 2 * N);
        const std::vector<float> floats = random_floats(static_cast<size_t>(2 * N * N_IN), 3);
        std::vector<float> raw(ggml_nbytes(both) / sizeof(float));
        ggml_quantize_chunk(GGML_TYPE_Q8_0, floats.data(), raw.data(), 0, 2 * N, N_IN, nullptr);
        p.set.insert(p.set.end(), {{rows, &x}, {both, &raw}});
        ggml_context * ctx = p.ctx.get();
        return ::run(
            p,
            [&] {
                const auto half = [&](size_t i) { return ggml_view_2d(ctx, both, N_IN, N, both->nb[1], i * N * both->nb[1]); };
                ggml_tensor * in = rounded(ctx, rows, form_of_q8_0());
                if (plain || are_halves) {
                    ggml_tensor * y = multiply(ctx, {both}, in).front();
                    return plain ? y : rounded(ctx, ggml_glu(ctx, y, kind, false), form_of_q8_0());
                }
                const std::vector<ggml_tensor *> each = multiply(ctx, {half(0), half(1)}, in);
                return rounded(ctx, ggml_glu_split(ctx, each[0], each[1], kind), form_of_q8_0());
            },
            of_team, of_ggml);
    }
    std::vector<double> naive() const {
        const std::vector<uint8_t> bytes = run(true).bytes;
        std::vector<float> products(bytes.size() / sizeof(float));
        std::memcpy(products.data(), bytes.data(), bytes.size());
        std::vector<double> y;
        for (size_t row = 0; row < products.size(); row += 2 * N) {
            for (size_t i = row; i < row + N; ++i) {
                const double g = products[i];
                const double opened = kind == GGML_GLU_OP_SWIGLU
                                          ? g / (1 + std::exp(-g))
                                          : 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
                y.push_back(opened * products[i + N]);
            }
        }
        return y;
    }
};

} // namespace

TEST_CASE("gates of products are opened where rows are rounded: F64's numbers, for a row alone and by any number of threads") {
    if (!product_kernel_for(GGML_TYPE_Q8_0)) {
        return;
    }
    for (const ggml_glu_op kind : {GGML_GLU_OP_SWIGLU, GGML_GLU_OP_GEGLU}) {
        for (const bool are_halves : {false, true}) {
            CAPTURE(are_halves);
            const gating all = {kind, are_halves, random_floats(19 * gating::N_IN, 4)};
            const result made = all.run(false);
            CHECK(made.operations.count("GLU") == 0);
            check_rounded(made.bytes, all.naive());
            for (const auto & [of_team, of_ggml] : {std::pair{2, 1}, {3, 1}, {1, 3}}) {
                CHECK(all.run(false, of_team, of_ggml).bytes == made.bytes);
            }
            CHECK(one_by_one(all.x, gating::N_IN, [&](std::vector<float> row) {
                      return gating{kind, are_halves, std::move(row)}.run(false).bytes;
                  }) == made.bytes);
        }
    }
}

TEST_CASE("a gate that the kernel hasn't, or whose numbers ggml makes, stays ggml's") {
    if (!product_kernel_for(GGML_TYPE_Q8_0)) {
        return;
    }
    CHECK(gating{GGML_GLU_OP_REGLU, false, random_floats(gating::N_IN, 4)}.run(false).operations.count("GLU") == 1);
    problem p(random_floats(2 * N, 1));
    const result of_ggml =
        run(p, [&] { return rounded(p.ctx.get(), ggml_swiglu_split(p.ctx.get(), p.rows, p.rows), form_of_q8_0()); });
    CHECK(of_ggml.operations.count("GLU") == 1);
}

TEST_CASE("a norm that is read outside of the graph is in it") {
    if (!product_kernel_for(GGML_TYPE_Q8_0)) {
        return;
    }
    problem p(random_floats(3 * N, 1));
    const result output = run(p, [&] {
        ggml_tensor * y = p.normed();
        ggml_set_output(y);
        return rounded(p.ctx.get(), y, form_of_q8_0());
    });
    CHECK(output.n_nodes == 2);
    check_rounded(output.bytes, naive_norm(p));
}

TEST_CASE("operations that are in no graph are wished nowhere") {
    const std::vector<active_adapter> no_adapters;
    builder b(no_adapters);
    ggml_tensor * x = b.input("x", GGML_TYPE_F32, N, 1);
    ggml_tensor * used = ggml_scale(b.ctx(), x, 2.0f);
    ggml_scale(b.ctx(), x, 3.0f);
    b.wish(cpu_device());
    CHECK(b.wishes().size() == 2);
    b.root(used);
    b.finish();
    REQUIRE(b.wishes().size() == 1);
    CHECK(b.wishes().front().first == used);
}
