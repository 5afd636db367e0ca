#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "backends.h"
#include "device.h"
#include "graph/builder.h"
#include "graph/own_node.h"
#include "graph/product.h"
#include "graph/rounding.h"
#include "host_memory.h"
#include "team.h"

using namespace kvg;

namespace {

constexpr int64_t N_IN = 512;

// (N_IN, n_out)
struct matrix {
    ggml_type type;
    int64_t n_out;
    std::vector<uint8_t> raw;
    std::vector<float> weights; // as the raw ones are read

    matrix(ggml_type type, int64_t n_out, std::mt19937 & random)
        : type(type), n_out(n_out), raw(ggml_row_size(type, N_IN) * static_cast<size_t>(n_out)),
          weights(static_cast<size_t>(N_IN * n_out)) {
        std::normal_distribution<float> normal;
        for (float & w : weights) {
            w = normal(random);
        }
        ggml_quantize_chunk(type, weights.data(), raw.data(), 0, n_out, N_IN, nullptr);
        ggml_get_type_traits(type)->to_float(raw.data(), weights.data(), static_cast<int64_t>(weights.size()));
    }
};

// Rows that rounding to bytes doesn't change
std::vector<float> whole_rows(int64_t n, std::mt19937 & random) {
    std::uniform_int_distribution<int> whole(-126, 126);
    std::vector<float> x(static_cast<size_t>(n * N_IN));
    for (size_t i = 0; i < x.size(); ++i) {
        x[i] = i % 32 == 0 ? 127.0f : static_cast<float>(whole(random));
    }
    return x;
}

// What all of them give in one operation. added: to the first one, nullptr: nothing
std::vector<std::vector<float>> together(const std::vector<matrix> & matrices, const std::vector<float> & x, int of_team,
                                         int of_ggml, const std::vector<float> * added = nullptr) {
    backends backends({cpu_device()});
    backends.set_threads(of_ggml);
    const team_share team(of_team);
    ggml_context_ptr leafs = new_ggml_context(16 * ggml_tensor_overhead());
    std::vector<ggml_tensor *> weights;
    for (const matrix & m : matrices) {
        weights.push_back(ggml_new_tensor_2d(leafs.get(), m.type, N_IN, m.n_out));
    }
    ggml_tensor * rows = ggml_new_tensor_2d(leafs.get(), GGML_TYPE_F32, N_IN, static_cast<int64_t>(x.size()) / N_IN);
    ggml_tensor * behind =
        added ? ggml_new_tensor_2d(leafs.get(), GGML_TYPE_F32, matrices.front().n_out, rows->ne[1]) : nullptr;
    const ggml_backend_buffer_ptr leaf_buffer(ggml_backend_alloc_ctx_tensors(leafs.get(), backends.cpu()));
    for (size_t i = 0; i < weights.size(); ++i) {
        ggml_backend_tensor_set(weights[i], matrices[i].raw.data(), 0, matrices[i].raw.size());
    }
    ggml_backend_tensor_set(rows, x.data(), 0, x.size() * sizeof(float));
    if (added) {
        ggml_backend_tensor_set(behind, added->data(), 0, ggml_nbytes(behind));
    }

    ggml_context_ptr nodes = new_ggml_context(32 * ggml_tensor_overhead() + ggml_graph_overhead());
    const row_form * form = form_of(weights.front(), rows);
    REQUIRE(form);
    std::vector<ggml_tensor *> each = multiply(nodes.get(), weights, rounded(nodes.get(), rows, *form));
    if (added) {
        each = {multiply_and_add(nodes.get(), each.front(), behind)};
        REQUIRE(each.front());
    }
    REQUIRE(each.size() == weights.size());
    ggml_cgraph * graph = ggml_new_graph(nodes.get());
    for (ggml_tensor * one : each) {
        ggml_build_forward_expand(graph, one);
    }
    const ggml_backend_buffer_ptr node_buffer(ggml_backend_alloc_ctx_tensors(nodes.get(), backends.cpu()));
    REQUIRE(ggml_backend_graph_compute(backends.cpu(), graph) == GGML_STATUS_SUCCESS);
    std::vector<std::vector<float>> results;
    for (ggml_tensor * one : each) {
        REQUIRE(ggml_is_contiguous(one));
        ggml_backend_tensor_get(one, results.emplace_back(static_cast<size_t>(ggml_nelements(one))).data(), 0,
                                ggml_nbytes(one));
    }
    return results;
}

// In F64
double product(const matrix & m, const std::vector<float> & x, size_t row, int64_t out) {
    double sum = 0;
    for (int64_t i = 0; i < N_IN; ++i) {
        sum += double{x[row * N_IN + static_cast<size_t>(i)]} * m.weights[static_cast<size_t>(out * N_IN + i)];
    }
    return sum;
}

} // namespace

TEST_CASE("products that are computed together are to the bit those of each matrix alone, by any number of threads") {
    if (!product_kernel_for(GGML_TYPE_Q4_K)) {
        return;
    }
    std::mt19937 random(7);
    // more than a piece, whole tiles and not, fewer rows than a tile; types that round alike
    const std::vector<matrix> matrices = {{GGML_TYPE_Q4_K, 1030, random},
                                          {GGML_TYPE_Q6_K, 48, random},
                                          {GGML_TYPE_Q4_K, 5, random},
                                          {GGML_TYPE_Q6_K, 301, random}};
    for (const int64_t n_rows : {1, 3, 70}) {
        CAPTURE(n_rows);
        const std::vector<float> x = whole_rows(n_rows, random);
        std::vector<std::vector<float>> alone;
        for (const matrix & m : matrices) {
            alone.push_back(together({m}, x, 1, 1).front());
            for (size_t i = 0; i < alone.back().size(); ++i) {
                const auto out = static_cast<int64_t>(i) % m.n_out;
                const double wanted = product(m, x, i / static_cast<size_t>(m.n_out), out);
                CHECK(std::fabs(alone.back()[i] - wanted) < 0.05); // of sums of 512 numbers up to some hundreds
            }
        }
        for (const auto & [of_team, of_ggml] : {std::pair{1, 1}, {2, 1}, {3, 1}, {1, 3}}) {
            CAPTURE(of_team);
            CAPTURE(of_ggml);
            CHECK(together(matrices, x, of_team, of_ggml) == alone);
        }
    }
}

TEST_CASE("a product is added to rows in one operation, where it is one matrix's, of the same shape, and read by nobody") {
    if (!product_kernel_for(GGML_TYPE_Q4_K)) {
        return;
    }
    const std::vector<active_adapter> no_adapters;
    builder b(no_adapters);
    const auto weight = [&](const char * name, int64_t n_out) { return b.input(name, GGML_TYPE_Q4_K, N_IN, n_out); };
    const auto floats = [&](int64_t n) { return b.input("x", GGML_TYPE_F32, n, 3); };
    ggml_tensor * rows = rounded(b.ctx(), floats(N_IN), product_kernel_for(GGML_TYPE_Q4_K)->form);
    ggml_tensor * product = called_as(multiply(b.ctx(), {weight("wo.weight", 48)}, rows).front(), weight("wo.weight", 48));
    ggml_tensor * sum = b.sum(product, floats(48));
    CHECK(is_multiply(sum));
    CHECK(std::string(ggml_get_name(sum)) == "wo");
    const auto by_ggml = [&](ggml_tensor * made, ggml_tensor * x) { return b.sum(made, x)->op == GGML_OP_ADD; };
    CHECK(by_ggml(sum, floats(48))); // it adds already
    CHECK(by_ggml(product, b.input("one", GGML_TYPE_F32, 48, 1)));
    CHECK(by_ggml(multiply(b.ctx(), {weight("q", 48), weight("k", 48)}, rows).front(), floats(48)));
    ggml_tensor * apart = ggml_view_2d(b.ctx(), floats(96), 48, 3, 96 * sizeof(float), 0);
    CHECK(by_ggml(product, apart));
    ggml_set_output(product);
    CHECK(by_ggml(product, floats(48)));
}

TEST_CASE("a product knows the one behind it in its graph, and the last one the first") {
    if (!product_kernel_for(GGML_TYPE_Q4_K)) {
        return;
    }
    const std::vector<active_adapter> no_adapters;
    builder b(no_adapters);
    const auto weight = [&](const char * name) { return b.input(name, GGML_TYPE_Q4_K, N_IN, N_IN); };
    ggml_tensor * x = b.input("x", GGML_TYPE_F32, N_IN, 1);
    ggml_tensor * rows = rounded(b.ctx(), x, product_kernel_for(GGML_TYPE_Q4_K)->form);
    ggml_tensor * first = multiply(b.ctx(), {weight("q"), weight("k")}, rows).front();
    ggml_tensor * unused = multiply(b.ctx(), {weight("wo")}, rows).front();
    ggml_tensor * last = b.sum(unused, first);
    b.root(last);
    b.finish();
    CHECK(own_word<ggml_tensor *>(first->view_src) == last);
    CHECK(own_word<ggml_tensor *>(last) == first->view_src);
}

TEST_CASE("what rows are added to is ggml's sum to the bit, by any number of threads") {
    if (!product_kernel_for(GGML_TYPE_Q4_K)) {
        return;
    }
    std::mt19937 random(8);
    const matrix m = {GGML_TYPE_Q4_K, 1030, random};
    for (const int64_t n_rows : {1, 70}) {
        const std::vector<float> x = whole_rows(n_rows, random);
        std::normal_distribution<float> normal;
        std::vector<float> added(static_cast<size_t>(n_rows * m.n_out));
        std::generate(added.begin(), added.end(), [&] { return normal(random); });
        std::vector<float> wanted = together({m}, x, 1, 1).front();
        for (size_t i = 0; i < wanted.size(); ++i) {
            wanted[i] += added[i];
        }
        for (const auto & [of_team, of_ggml] : {std::pair{1, 1}, {2, 1}, {1, 3}}) {
            CHECK(together({m}, x, of_team, of_ggml, &added).front() == wanted);
        }
    }
}
