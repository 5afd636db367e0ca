#include "graph/expert_product.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <vector>

#include <ggml-backend.h>

#include "cpu/kernel.h"
#include "graph/own_node.h"
#include "graph/row.h"
#include "graph/thread_share.h"

namespace kvg {

namespace {

// What expert_order() made: where the pairs of each expert begin, and the place of each pair in that order.
struct pair_order {
    uint32_t n_expert;
    uint32_t n_pairs;
    int32_t * begins; // (n_expert + 1)
    int32_t * places; // (n_used, n_tokens)

    pair_order(const ggml_tensor * order, int64_t n_pairs)
        : n_expert(static_cast<uint32_t>(order->ne[0] - n_pairs - 1)), n_pairs(static_cast<uint32_t>(n_pairs)),
          begins(static_cast<int32_t *>(order->data)), places(begins + n_expert + 1) {}
    uint32_t first(uint32_t expert) const { return static_cast<uint32_t>(begins[expert]); }
    uint32_t count(uint32_t expert) const { return static_cast<uint32_t>(begins[expert + 1] - begins[expert]); }
    uint32_t place(uint64_t pair) const { return static_cast<uint32_t>(places[pair]); }
};

// A counting sort.
void run_order(ggml_tensor * dst, int ith, int, void *) {
    if (ith > 0) {
        return;
    }
    const ggml_tensor * experts = dst->src[0];
    const pair_order order(dst, ggml_nelements(experts));
    const auto each_pair = [&](auto visit) {
        int32_t * place = order.places;
        for (int64_t t = 0; t < experts->ne[1]; ++t) {
            const auto * of_token = row_of<const int32_t>(experts, static_cast<size_t>(t));
            for (int64_t i = 0; i < experts->ne[0]; ++i) {
                visit(of_token[i], *place++);
            }
        }
    };
    std::fill_n(order.begins, order.n_expert + 1, 0);
    each_pair([&](int32_t expert, int32_t & place) { place = order.begins[expert + 1]++; }); // among its expert's
    for (uint32_t e = 0; e < order.n_expert; ++e) {
        order.begins[e + 1] += order.begins[e];
    }
    each_pair([&](int32_t expert, int32_t & place) { place += order.begins[expert]; });
}

// A token's row goes to all of its experts, unless it has one for each.
void run_round(ggml_tensor * dst, int ith, int nth, void * form) {
    const auto & how = *static_cast<const row_form *>(form);
    const ggml_tensor * x = dst->src[0];
    const pair_order order(dst->src[1], dst->ne[1]);
    const auto n_tokens = static_cast<uint32_t>(x->ne[2]);
    const uint32_t n_used = order.n_pairs / n_tokens;
    const auto n_rows = static_cast<uint32_t>(x->ne[1]);
    const auto row_of_pair = [&](uint64_t pair) { return row_of<uint8_t>(dst, order.place(pair)); };
    const auto n_in = static_cast<uint32_t>(x->ne[0]);
    const auto token = [&](uint32_t t) {
        for (uint32_t i = 0; i < n_used; ++i) {
            uint8_t * to = row_of_pair(uint64_t{t} * n_used + i);
            if (i < n_rows) {
                how.round(row_of<const float>(x, i, t), to, n_in);
            } else {
                std::memcpy(to, row_of_pair(uint64_t{t} * n_used), dst->nb[1]);
            }
        }
    };
    share_out(n_tokens, 1, PASSED_AT_ONCE / (n_in * n_rows), ith, nth, [&](uint32_t begin, uint32_t end) {
        for (uint32_t t = begin; t < end; ++t) {
            token(t);
        }
    });
}

// What one matrix gives for some of an expert's rows.
struct expert_factor {
    const ggml_tensor * weight;
    const ggml_tensor * scale;
    const ggml_tensor * bias;
    const product_kernel * kernel;

    explicit expert_factor(ggml_tensor * const src[3])
        : weight(src[0]), scale(src[1]), bias(src[2]), kernel(weight ? product_kernel_for(weight->type) : nullptr) {}

    // Outputs [first, first + width), whole tiles unless they are the last. out: all outputs of each row, or, if apart, these alone
    void multiply(uint32_t expert, uint32_t first, uint32_t width, const uint8_t * rows, uint32_t n_rows, float * out,
                  bool apart) const {
        const auto n_out = apart ? width : static_cast<uint32_t>(weight->ne[1]);
        const uint32_t skipped = apart ? first : 0;
        const uint32_t begin = first - skipped;
        const product_job job = {matrix(expert) + skipped * weight->nb[1], weight->nb[1], rows, out, n_in(), n_out, n_rows};
        kernel->run(job, begin / PRODUCT_TILE, (begin + width + PRODUCT_TILE - 1) / PRODUCT_TILE);
        const float factor = scale ? static_cast<const float *>(scale->data)[expert] : 1.0f;
        const auto * more = bias ? row_of<const float>(bias, expert) : nullptr;
        for (uint32_t r = 0; (scale || bias) && r < n_rows; ++r) {
            float * y = out + size_t{r} * n_out + begin;
            for (uint32_t i = 0; i < width; ++i) {
                y[i] = y[i] * factor + (more ? more[first + i] : 0.0f);
            }
        }
    }

private:
    const uint8_t * matrix(uint32_t expert) const {
        return static_cast<const uint8_t *>(weight->data) + expert * weight->nb[2];
    }
    uint32_t n_in() const { return static_cast<uint32_t>(weight->ne[0]); }
};

constexpr uint32_t ROWS = 64;           // at a time, as kernels have it
constexpr uint32_t SCRATCH = 4096;      // floats of ups at a time, so that they stay in L1
constexpr uint64_t COST_OF_WEIGHTS = 4; // of reading a tile, beside that of a row with it
constexpr uint32_t PARTS = 256;         // that the work of a node is cut into

// All that a node does: for all experts, all tiles and all rows.
class expert_work {
public:
    // sources: the rows, the order; weight, scale and bias; the same of ups, where there is a gate: the node's own word
    explicit expert_work(ggml_tensor * dst)
        : dst_(dst), rows_(dst->src[0]), order_(dst->src[1], rows_->ne[1]), factor_(dst->src + 2), up_(dst->src + 5),
          gate_(own_word<gate_function>(dst)), n_out_(static_cast<uint32_t>(dst->ne[0])),
          n_tiles_((n_out_ + PRODUCT_TILE - 1) / PRODUCT_TILE) {
        for (uint32_t e = 0; e < order_.n_expert; ++e) {
            total_ += cost(e) * n_tiles_;
        }
    }

    // How many of PARTS are worth claiming.
    uint32_t least() const {
        const uint64_t n_pairs = uint64_t{PRODUCT_TILE} * static_cast<uint64_t>(factor_.weight->ne[0]) * total_;
        return static_cast<uint32_t>(std::min<uint64_t>(PARTS, PARTS * MULTIPLIED_AT_ONCE / n_pairs + 1));
    }
    // Parts [first, last) of PARTS, which cost the same: the tiles that begin there on a line on which all tiles lie.
    void parts(uint64_t first, uint64_t last) const {
        const uint64_t begin = total_ * first / PARTS;
        const uint64_t end = total_ * last / PARTS;
        uint64_t at = 0;
        for (uint32_t e = 0; e < order_.n_expert && at < end; ++e) {
            const uint64_t cost = this->cost(e);
            const auto tile = [&](uint64_t place) {
                return static_cast<uint32_t>(place <= at ? 0 : std::min<uint64_t>(n_tiles_, (place - at + cost - 1) / cost));
            };
            if (cost > 0) {
                tiles(e, tile(begin), tile(end));
            }
            at += cost * n_tiles_;
        }
    }

private:
    // of a tile
    uint64_t cost(uint32_t expert) const {
        const uint32_t n = order_.count(expert);
        return n > 0 ? n + COST_OF_WEIGHTS : 0;
    }
    void tiles(uint32_t expert, uint32_t begin, uint32_t end) const {
        const uint32_t n_rows = order_.count(expert);
        const uint32_t width = std::max(1u, SCRATCH / PRODUCT_TILE / std::min(n_rows, ROWS)) * PRODUCT_TILE;
        const uint32_t last = std::min(end * PRODUCT_TILE, n_out_);
        for (uint32_t out = begin * PRODUCT_TILE; out < last; out += width) {
            for (uint32_t row = 0; row < n_rows; row += ROWS) {
                block(expert, out, std::min(width, last - out), order_.first(expert) + row, std::min(ROWS, n_rows - row));
            }
        }
    }
    void block(uint32_t expert, uint32_t out, uint32_t width, uint32_t row, uint32_t n_rows) const {
        const auto * rows = row_of<const uint8_t>(rows_, row);
        float * y = static_cast<float *>(dst_->data) + size_t{row} * n_out_;
        factor_.multiply(expert, out, width, rows, n_rows, y, false);
        if (gate_) {
            alignas(64) float ups[SCRATCH];
            up_.multiply(expert, out, width, rows, n_rows, ups, true);
            for (uint32_t r = 0; r < n_rows; ++r) {
                float * gates = y + size_t{r} * n_out_ + out;
                gate_(gates, ups + size_t{r} * width, gates, width);
            }
        }
    }

    ggml_tensor * dst_;
    const ggml_tensor * rows_;
    pair_order order_;
    expert_factor factor_;
    expert_factor up_;
    gate_function gate_; // or nullptr
    uint32_t n_out_;
    uint32_t n_tiles_;
    uint64_t total_ = 0; // of the costs of all tiles
};

void run_work(ggml_tensor * dst, int ith, int nth, void *) {
    const expert_work work(dst);
    share_out(PARTS, 1, work.least(), ith, nth, [&](uint32_t begin, uint32_t end) { work.parts(begin, end); });
}

// In the order of a token's experts, so that a sum is what it is for the token alone.
void run_sum(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * y = dst->src[0];
    const pair_order order(dst->src[1], y->ne[1]);
    const auto * weights = dst->src[2] ? static_cast<const float *>(dst->src[2]->data) : nullptr;
    const auto n = static_cast<uint64_t>(dst->ne[0]);
    const auto n_tokens = static_cast<uint32_t>(dst->ne[1]);
    const uint32_t n_used = order.n_pairs / n_tokens;
    share_out(static_cast<uint32_t>(n * n_tokens), 1, PASSED_AT_ONCE, ith, nth, [&](uint64_t begin, uint64_t end) {
        while (begin < end) {
            const uint64_t token = begin / n;
            const uint64_t stop = std::min((token + 1) * n, end);
            const weighted_rows rows = {static_cast<const float *>(y->data), n, order.places + token * n_used,
                                        weights ? weights + token * n_used : nullptr, n_used};
            kernels_here()[0]->feed_forward.sum(rows, static_cast<float *>(dst->data) + token * n,
                                                static_cast<uint32_t>(begin % n), static_cast<uint32_t>(stop - token * n));
            begin = stop;
        }
    });
}

ggml_tensor * custom(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1, std::initializer_list<ggml_tensor *> sources,
                     ggml_custom_op_t run, const void * data = nullptr, int n_tasks = GGML_N_TASKS_MAX) {
    std::vector<ggml_tensor *> args(sources);
    return ggml_custom_4d(ctx, type, ne0, ne1, 1, 1, args.data(), static_cast<int>(args.size()), run, n_tasks,
                          const_cast<void *>(data));
}

} // namespace

const row_form * form_of_experts(const ggml_tensor * weight, const ggml_tensor * x) {
    const product_kernel * kernel = product_kernel_for(weight->type);
    // floats: ggml computes the gate as exactly as the products
    const bool runs = kernel && ggml_is_quantized(weight->type) && ggml_backend_buffer_is_host(weight->buffer) &&
                      x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float);
    return runs ? &kernel->form : nullptr;
}

ggml_tensor * expert_order(ggml_context * ctx, ggml_tensor * experts, int64_t n_expert) {
    return custom(ctx, GGML_TYPE_I32, n_expert + 1 + ggml_nelements(experts), 1, {experts}, run_order, nullptr, 1);
}

ggml_tensor * rounded_in_order(ggml_context * ctx, ggml_tensor * x, ggml_tensor * experts, ggml_tensor * order,
                               const row_form & form) {
    const auto n_bytes = static_cast<int64_t>(form.bytes(static_cast<uint32_t>(x->ne[0])));
    return custom(ctx, GGML_TYPE_I8, n_bytes, ggml_nelements(experts), {x, order}, run_round, &form);
}

bool is_expert_product(const ggml_tensor * node) { return function_of(node) == run_work; }

ggml_tensor * multiply_in_order(ggml_context * ctx, const expert_matrix & matrix, ggml_tensor * rows, ggml_tensor * order) {
    return custom(ctx, GGML_TYPE_F32, matrix.weight->ne[1], rows->ne[1],
                  {rows, order, matrix.weight, matrix.scale, matrix.bias}, run_work);
}

ggml_tensor * gate_in_order(ggml_context * ctx, const expert_matrix & gates, const expert_matrix & ups, ggml_tensor * rows,
                            ggml_tensor * order, gate_function gate) {
    ggml_tensor * node =
        custom(ctx, GGML_TYPE_F32, ups.weight->ne[1], rows->ne[1],
               {rows, order, gates.weight, gates.scale, gates.bias, ups.weight, ups.scale, ups.bias}, run_work);
    set_own_word(node, gate);
    return node;
}

ggml_tensor * by_tokens(ggml_context * ctx, ggml_tensor * y, ggml_tensor * experts, ggml_tensor * order) {
    const int64_t n_pairs = y->ne[1];
    ggml_tensor * places = ggml_view_1d(ctx, order, n_pairs, static_cast<size_t>(order->ne[0] - n_pairs) * order->nb[0]);
    return ggml_reshape_3d(ctx, ggml_get_rows(ctx, y, places), y->ne[0], experts->ne[0], experts->ne[1]);
}

ggml_tensor * sum_by_tokens(ggml_context * ctx, ggml_tensor * y, ggml_tensor * experts, ggml_tensor * order,
                            ggml_tensor * weights) {
    return custom(ctx, GGML_TYPE_F32, y->ne[0], experts->ne[1], {y, order, weights}, run_sum);
}

} // namespace kvg
