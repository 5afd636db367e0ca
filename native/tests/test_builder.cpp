#include <doctest/doctest.h>

#include "error.h"
#include "graph/builder.h"

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
