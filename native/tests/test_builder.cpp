#include <doctest/doctest.h>

#include "backends.h"
#include "device.h"
#include "error.h"
#include "graph/builder.h"
#include "graph/rms_norm.h"
#include "host_memory.h"

using namespace kvg;

static const std::vector<active_adapter> NO_ADAPTERS;

static void make_tensors(ggml_context * ctx, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1);
    }
}

TEST_CASE("an operation may make as many tensors as were counted, in every chunk") {
    builder b(NO_ADAPTERS);
    for (int i = 0; i < 100; ++i) {
        make_tensors(b.ctx(), builder::MAX_OPERATION);
    }
    CHECK(b.finish() != nullptr);
}

TEST_CASE("an operation that makes more tensors than were counted is an internal error") {
    builder next(NO_ADAPTERS);
    make_tensors(next.ctx(), builder::MAX_OPERATION + 1);
    CHECK_THROWS_AS(next.ctx(), error);
    builder last(NO_ADAPTERS);
    make_tensors(last.ctx(), builder::MAX_OPERATION + 1);
    CHECK_THROWS_AS(last.finish(), error);
}

TEST_CASE("a tensor that becomes an output after products that compute it by themselves is an internal error") {
    const product_kernel * kernel = product_kernel_for(GGML_TYPE_Q8_0);
    if (!kernel) {
        return;
    }
    constexpr int64_t N = 64;
    const backends backends({cpu_device()});
    ggml_context_ptr weights = new_ggml_context(2 * ggml_tensor_overhead());
    ggml_tensor * norm = ggml_new_tensor_1d(weights.get(), GGML_TYPE_F32, N);
    ggml_tensor * matrix = ggml_new_tensor_2d(weights.get(), GGML_TYPE_Q8_0, N, N);
    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(weights.get(), backends.cpu()));
    const auto normed = [&](builder & b) { return rms_norm(b.ctx(), b.input("x", GGML_TYPE_F32, N, 1), norm, 1e-5f); };
    const auto sum = [&](builder & b, ggml_tensor * product) { return b.sum(product, b.input("y", GGML_TYPE_F32, N, 1)); };
    builder late_norm(NO_ADAPTERS);
    ggml_tensor * x = normed(late_norm);
    late_norm.root(late_norm.product(x, matrix));
    ggml_set_output(x);
    CHECK_THROWS_AS(late_norm.finish(), error);

    builder late_product(NO_ADAPTERS);
    ggml_tensor * product = late_product.product(normed(late_product), matrix);
    late_product.root(sum(late_product, product));
    ggml_set_output(product);
    CHECK_THROWS_AS(late_product.finish(), error);

    builder in_time(NO_ADAPTERS);
    x = normed(in_time);
    ggml_set_output(x);
    product = in_time.product(x, matrix);
    ggml_set_output(product);
    in_time.root(sum(in_time, product));
    CHECK(in_time.finish() != nullptr);
}
