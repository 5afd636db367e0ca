#include "graph/product.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include <ggml-backend.h>

#include "cpu/products.h"
#include "graph/thread_share.h"

namespace kvg {

namespace {

uint32_t tiles_of(const ggml_tensor * weight) {
    return (static_cast<uint32_t>(weight->ne[1]) + PRODUCT_TILE - 1) / PRODUCT_TILE;
}

// The products lie behind one another.
void run_multiply(ggml_tensor * dst, int ith, int nth, void *) {
    const auto is_used = [](const ggml_tensor * source) { return source != nullptr; };
    const auto n_weights = static_cast<size_t>(std::count_if(std::begin(dst->src), std::end(dst->src), is_used)) - 1;
    const auto * rows = static_cast<const uint8_t *>(dst->src[n_weights]->data);
    const auto n_rows = static_cast<uint32_t>(dst->ne[1]);
    uint32_t n_tiles = 0;
    for (size_t w = 0; w < n_weights; ++w) {
        n_tiles += tiles_of(dst->src[w]);
    }
    const uint64_t of_tile = uint64_t{PRODUCT_TILE} * static_cast<uint64_t>(dst->src[0]->ne[0]) * n_rows;
    auto min_tiles = static_cast<uint32_t>((MULTIPLIED_AT_ONCE + of_tile - 1) / of_tile);
    if (n_rows == 1 && n_tiles >= 2 * min_tiles * static_cast<uint32_t>(team_share::n_threads())) {
        min_tiles *= 2; // a CPU fetches ahead in long pieces: SmolLM2 decodes 5 % faster on Zen 3
    }
    share_out(n_tiles, 1, min_tiles, ith, nth, [&](uint32_t begin, uint32_t end) {
        auto * out = static_cast<float *>(dst->data);
        uint32_t first = 0; // tile of a weight
        for (size_t w = 0; w < n_weights; ++w) {
            const ggml_tensor * weight = dst->src[w];
            const uint32_t last = first + tiles_of(weight);
            if (begin < last && first < end) {
                const product_job job = {
                    static_cast<const uint8_t *>(weight->data), weight->nb[1], rows, out, static_cast<uint32_t>(weight->ne[0]),
                    static_cast<uint32_t>(weight->ne[1]),       n_rows};
                product_kernel_for(weight->type)->run(job, std::max(begin, first) - first, std::min(end, last) - first);
            }
            first = last;
            out += static_cast<size_t>(weight->ne[1]) * n_rows;
        }
    });
}

} // namespace

const row_form * form_of(const ggml_tensor * weight, const ggml_tensor * x) {
    const product_kernel * kernel = product_kernel_for(weight->type);
    const bool runs = kernel && ggml_backend_buffer_is_host(weight->buffer) && ggml_is_matrix(weight) && ggml_is_matrix(x) &&
                      x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float);
    return runs ? &kernel->form : nullptr;
}

bool is_multiply(const ggml_tensor * node) {
    ggml_custom_op_t run = nullptr; // the first of ggml's parameters of such an operation
    memcpy(&run, node->op_params, sizeof(run));
    return node->op == GGML_OP_CUSTOM && run == run_multiply;
}

std::vector<ggml_tensor *> multiply(ggml_context * ctx, const std::vector<ggml_tensor *> & weights, ggml_tensor * rows) {
    std::vector<ggml_tensor *> args = weights;
    args.push_back(rows);
    int64_t n_out = 0;
    for (const ggml_tensor * weight : weights) {
        n_out += weight->ne[1];
    }
    ggml_tensor * all = ggml_custom_4d(ctx, GGML_TYPE_F32, n_out, rows->ne[1], 1, 1, args.data(), static_cast<int>(args.size()),
                                       run_multiply, GGML_N_TASKS_MAX, nullptr);
    if (weights.size() == 1) {
        return {all};
    }
    std::vector<ggml_tensor *> each;
    size_t offset = 0;
    for (const ggml_tensor * weight : weights) {
        const size_t row_bytes = static_cast<size_t>(weight->ne[1]) * sizeof(float);
        each.push_back(ggml_view_2d(ctx, all, weight->ne[1], rows->ne[1], row_bytes, offset));
        offset += row_bytes * static_cast<size_t>(rows->ne[1]);
    }
    return each;
}

} // namespace kvg
