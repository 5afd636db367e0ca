#include "graph/product.h"

#include <algorithm>
#include <iterator>

#include <ggml-backend.h>

#include "cpu/products.h"
#include "graph/own_node.h"
#include "graph/row.h"
#include "graph/thread_share.h"

namespace kvg {

namespace {

uint32_t tiles_of(const ggml_tensor * weight) {
    return (static_cast<uint32_t>(weight->ne[1]) + PRODUCT_TILE - 1) / PRODUCT_TILE;
}

// Rows, which are bytes, are the first source behind the weights. What a product is added to may come behind them.
size_t n_weights_of(const ggml_tensor * node) {
    const auto is_rows = [](const ggml_tensor * source) { return source->type == GGML_TYPE_I8; };
    return static_cast<size_t>(std::find_if(std::begin(node->src), std::end(node->src), is_rows) - std::begin(node->src));
}

uint32_t n_tiles_of(const ggml_tensor * product) {
    uint32_t n = 0;
    for (size_t w = 0; w < n_weights_of(product); ++w) {
        n += tiles_of(product->src[w]) * static_cast<uint32_t>(product->src[w]->ne[2]);
    }
    return n;
}

// Tiles [begin, end) of a product, each matrix's by themselves: visit(weight, place in it, outputs of the matrices before it, first, last), of
// its own tiles [first, last).
template <class F> void each_matrix(const ggml_tensor * product, uint32_t begin, uint32_t end, F visit) {
    const size_t n_weights = n_weights_of(product);
    size_t n_out = 0;
    uint32_t first = 0;
    for (size_t w = 0; w < n_weights; ++w) {
        const ggml_tensor * weight = product->src[w];
        for (int64_t i = 0; i < weight->ne[2] && first < end; ++i) {
            const uint32_t last = first + tiles_of(weight);
            if (begin < last) {
                visit(weight, static_cast<size_t>(i), n_out, std::max(begin, first) - first, std::min(end, last) - first);
            }
            first = last;
            n_out += static_cast<size_t>(weight->ne[1]);
        }
    }
}

constexpr int64_t FEW_ROWS = 8;          // whose products take as long as reading the weights
constexpr size_t READ_AHEAD = 128 << 10; // bytes, which stay in a second-level cache

// Threads that wait until the next product is asked for read what they will begin with. Memory would rest meanwhile.
void read_ahead(const ggml_tensor * next) {
    const uint32_t n_tiles = n_tiles_of(next);
    const auto n_threads = static_cast<uint32_t>(team_share::n_threads());
    for (uint32_t i = 1; i < n_threads; ++i) {
        const uint32_t tile = part_begin(n_tiles, i, n_threads);
        each_matrix(next, tile, tile + 1, [&](const ggml_tensor * weight, size_t matrix, size_t, uint32_t first, uint32_t) {
            const size_t offset = matrix * weight->nb[2] + first * PRODUCT_TILE * weight->nb[1];
            team::here().read_ahead(static_cast<int>(i), static_cast<const uint8_t *>(weight->data) + offset,
                                    std::min(READ_AHEAD, ggml_nbytes(weight) - offset));
        });
    }
}

// The products lie behind one another. A node's own word is the product behind it, or nullptr.
void run_multiply(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * next = own_word<ggml_tensor *>(dst);
    if (next && nth == 1 && dst->ne[1] <= FEW_ROWS) {
        read_ahead(next);
    }
    const size_t n_weights = n_weights_of(dst);
    const ggml_tensor * rows = dst->src[n_weights];
    const ggml_tensor * added = n_weights == 1 ? dst->src[2] : nullptr;
    const auto n_rows = static_cast<uint32_t>(dst->ne[1]);
    const uint32_t n_tiles = n_tiles_of(dst);
    const uint64_t of_tile = uint64_t{PRODUCT_TILE} * static_cast<uint64_t>(dst->src[0]->ne[0]) * n_rows;
    auto min_tiles = static_cast<uint32_t>((MULTIPLIED_AT_ONCE + of_tile - 1) / of_tile);
    if (n_rows == 1 && n_tiles >= 2 * min_tiles * static_cast<uint32_t>(team_share::n_threads())) {
        min_tiles *= 2; // a CPU fetches ahead in long pieces: SmolLM2 decodes 5 % faster on Zen 3
    }
    share_out(n_tiles, 1, min_tiles, ith, nth, [&](uint32_t begin, uint32_t end) {
        each_matrix(dst, begin, end,
                    [&](const ggml_tensor * weight, size_t matrix, size_t n_before, uint32_t first, uint32_t last) {
                        const product_job job = {row_of<const uint8_t>(weight, 0, matrix),
                                                 weight->nb[1],
                                                 row_of<const uint8_t>(rows, 0, matrix),
                                                 static_cast<float *>(dst->data) + n_before * n_rows,
                                                 static_cast<uint32_t>(weight->ne[0]),
                                                 static_cast<uint32_t>(weight->ne[1]),
                                                 n_rows,
                                                 added ? static_cast<const float *>(added->data) : nullptr};
                        product_kernel_for(weight->type)->run(job, first, last);
                    });
    });
}

} // namespace

const row_form * form_of(const ggml_tensor * weight, const ggml_tensor * x) {
    const product_kernel * kernel = product_kernel_for(weight->type);
    const bool runs = kernel && ggml_backend_buffer_is_host(weight->buffer) && weight->ne[2] == x->ne[2] &&
                      x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float);
    return runs ? &kernel->form : nullptr;
}

bool is_multiply(const ggml_tensor * node) { return function_of(node) == run_multiply; }

std::vector<ggml_tensor *> multiply(ggml_context * ctx, const std::vector<ggml_tensor *> & weights, ggml_tensor * rows) {
    std::vector<ggml_tensor *> args = weights;
    args.push_back(rows);
    int64_t n_out = 0;
    for (const ggml_tensor * weight : weights) {
        n_out += weight->ne[1];
    }
    ggml_tensor * all = ggml_custom_4d(ctx, GGML_TYPE_F32, n_out, rows->ne[1], rows->ne[2], 1, args.data(),
                                       static_cast<int>(args.size()), run_multiply, GGML_N_TASKS_MAX, nullptr);
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

ggml_tensor * multiply_and_add(ggml_context * ctx, ggml_tensor * product, ggml_tensor * x) {
    const bool can = is_multiply(product) && ggml_is_matrix(product) && n_weights_of(product) == 1 && !product->src[2] &&
                     x->type == GGML_TYPE_F32 && ggml_are_same_shape(product, x) && ggml_is_contiguous(x) &&
                     (product->flags & GGML_TENSOR_FLAG_OUTPUT) == 0;
    if (!can) {
        return nullptr;
    }
    ggml_tensor * args[] = {product->src[0], product->src[1], x};
    ggml_tensor * sum = ggml_custom_4d(ctx, GGML_TYPE_F32, product->ne[0], product->ne[1], 1, 1, args, 3, run_multiply,
                                       GGML_N_TASKS_MAX, nullptr);
    return ggml_set_name(sum, ggml_get_name(product));
}

void set_order_of_products(ggml_cgraph * graph) {
    ggml_tensor * first = nullptr;
    ggml_tensor * last = nullptr;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (!is_multiply(node)) {
            continue;
        }
        first = first ? first : node;
        if (last) {
            set_own_word(last, node);
        }
        last = node;
    }
    if (last) {
        set_own_word(last, first);
    }
}

} // namespace kvg
