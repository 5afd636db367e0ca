#include "graph/rounding.h"

#include <algorithm>

#include "cpu/kernel.h"
#include "graph/gate.h"
#include "graph/own_node.h"
#include "graph/product.h"
#include "graph/rms_norm.h"
#include "graph/row.h"
#include "graph/thread_share.h"

namespace kvg {

namespace {

constexpr uint32_t PIECE = 1024; // numbers at a time, which stay in L1
static_assert(PIECE % LARGEST_BLOCK == 0);

// Calls round(row, to) for each row, of all matrices.
template <class F> void each_row(ggml_tensor * dst, int ith, int nth, F round) {
    const auto n = static_cast<uint32_t>(dst->src[0]->ne[0]);
    share_out(static_cast<uint32_t>(ggml_nrows(dst)), 1, PASSED_AT_ONCE / n, ith, nth, [&](uint32_t begin, uint32_t end) {
        for (uint32_t r = begin; r < end; ++r) {
            round(r, row_of<uint8_t>(dst, r));
        }
    });
}

// Rounds a row that is made piece by piece: make(first, count, to).
template <class F> void round_pieces(const row_form & form, uint8_t * row, uint32_t n, F make) {
    alignas(64) float piece[PIECE];
    for (uint32_t begin = 0; begin < n; begin += PIECE) {
        const uint32_t end = std::min(begin + PIECE, n);
        make(begin, end - begin, piece);
        form.round_part(piece, row, n, begin, end);
    }
}

void run_round(ggml_tensor * dst, int ith, int nth, void * form) {
    const ggml_tensor * x = dst->src[0];
    each_row(dst, ith, nth, [&](uint32_t r, uint8_t * to) {
        const auto n_rows = static_cast<uint32_t>(x->ne[1]);
        static_cast<const row_form *>(form)->round(row_of<const float>(x, r % n_rows, r / n_rows), to,
                                                   static_cast<uint32_t>(x->ne[0]));
    });
}

void run_norm(ggml_tensor * dst, int ith, int nth, void * form) {
    const norm_kernel & kernel = kernels_here()[0]->norm;
    const ggml_tensor * x = dst->src[0];
    const auto * weight = static_cast<const float *>(dst->src[1]->data);
    const auto n = static_cast<uint32_t>(x->ne[0]);
    const float eps = eps_of(dst);
    each_row(dst, ith, nth, [&](uint32_t r, uint8_t * to) {
        const auto * row = row_of<const float>(x, r);
        const float factor = kernel.factor(row, n, eps);
        round_pieces(*static_cast<const row_form *>(form), to, n, [&](uint32_t first, uint32_t count, float * piece) {
            kernel.apply(row + first, weight + first, factor, piece, count);
        });
    });
}

// Gates and ups are rows of two tensors, or halves of rows of one.
void run_gate(ggml_tensor * dst, int ith, int nth, void * form) {
    const auto gate = own_word<gate_function>(dst);
    const bool are_halves = !dst->src[1];
    const ggml_tensor * gates = dst->src[0];
    const ggml_tensor * ups = are_halves ? gates : dst->src[1];
    const auto n = static_cast<uint32_t>(gates->ne[0] / (are_halves ? 2 : 1));
    each_row(dst, ith, nth, [&](uint32_t r, uint8_t * to) {
        const auto * row = row_of<const float>(gates, r);
        const auto * up = row_of<const float>(ups, r) + (are_halves ? n : 0);
        round_pieces(*static_cast<const row_form *>(form), to, n,
                     [&](uint32_t first, uint32_t count, float * piece) { gate(row + first, up + first, piece, count); });
    });
}

bool is_output(const ggml_tensor * x) { return (x->flags & GGML_TENSOR_FLAG_OUTPUT) != 0; }

bool has_rows_of_floats(const ggml_tensor * x) {
    return x->type == GGML_TYPE_F32 && ggml_is_matrix(x) && x->nb[0] == sizeof(float);
}

// The gate that x is, if it is one of our own products, which are on the CPU: of ggml's the device may be another one. Else nullptr.
gate_function gate_here(const ggml_tensor * x) {
    if (x->op != GGML_OP_GLU || ggml_get_glu_op(x) == GGML_GLU_OP_SWIGLU_OAI || is_output(x)) { // which has numbers of its own
        return nullptr;
    }
    const auto is_ours = [](const ggml_tensor * y) {
        return has_rows_of_floats(y) && is_multiply(y->view_src ? y->view_src : y);
    };
    const bool are_swapped = x->op_params[1] != 0; // halves, the ups before the gates
    const bool all_ours = is_ours(x->src[0]) && (x->src[1] ? is_ours(x->src[1]) : !are_swapped);
    return all_ours ? gate_of(ggml_get_glu_op(x)) : nullptr;
}

} // namespace

ggml_tensor * rounded(ggml_context * ctx, ggml_tensor * x, const row_form & form) {
    const auto n_bytes = static_cast<int64_t>(form.bytes(static_cast<uint32_t>(x->ne[0])));
    const auto custom = [&](ggml_tensor * first, ggml_tensor * second, ggml_custom_op_t run) {
        ggml_tensor * args[] = {first, second};
        return ggml_custom_4d(ctx, GGML_TYPE_I8, n_bytes, x->ne[1], x->ne[2], 1, args, second ? 2 : 1, run, GGML_N_TASKS_MAX,
                              const_cast<row_form *>(&form));
    };
    if (is_rms_norm(x) && ggml_is_matrix(x) && !is_output(x)) {
        ggml_tensor * node = custom(x->src[0], x->src[1], run_norm);
        set_own_word(node, eps_of(x));
        return node;
    }
    if (const gate_function gate = gate_here(x)) {
        ggml_tensor * node = custom(x->src[0], x->src[1], run_gate);
        set_own_word(node, gate);
        return node;
    }
    return custom(x, nullptr, run_round);
}

} // namespace kvg
