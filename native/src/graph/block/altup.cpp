#include "graph/block/altup.h"

#include "graph/block/layer_embedding.h"
#include "graph/block/norm.h"

namespace kvg {

namespace {

// The length of each column: (1, ...)
ggml_tensor * length(builder & b, ggml_tensor * x) { return ggml_sqrt(b.ctx(), ggml_sum_rows(b.ctx(), ggml_sqr(b.ctx(), x))); }

// Each of x's matrices times a matrix of its own, and every column as long as `like`. x (n_embd, n_tokens, n), matrices (n_embd, n_embd, n),
// like (n_embd, n_tokens)
ggml_tensor * turned(builder & b, ggml_tensor * x, ggml_tensor * matrices, ggml_tensor * like) {
    ggml_tensor * y = b.product_of_each(x, matrices);
    return ggml_div(b.ctx(), ggml_mul(b.ctx(), y, length(b, like)), length(b, y));
}

// All states but the first: (n_embd, n - 1, n_tokens)
ggml_tensor * others(builder & b, ggml_tensor * states) {
    return ggml_view_3d(b.ctx(), states, states->ne[0], states->ne[1] - 1, states->ne[2], states->nb[1], states->nb[2],
                        states->nb[1]);
}

// How much each state counts, by what a token's active one is: (n_altup, n_tokens)
ggml_tensor * shares(builder & b, const model & of, uint32_t layer, ggml_tensor * x) {
    const role_tensors & w = of.layers()[layer];
    ggml_tensor * in = norm(b, of.hparams().norm, x, w[role::altup_router_norm], of.hparams().norm_eps);
    in = ggml_scale(b.ctx(), in, 1.0f / static_cast<float>(x->ne[0]));
    return ggml_tanh(b.ctx(), b.product(in, w[role::altup_router]));
}

} // namespace

ggml_tensor * altup_active(builder & b, ggml_tensor * states) {
    ggml_tensor * first = ggml_view_2d(b.ctx(), states, states->ne[0], states->ne[2], states->nb[2], 0);
    return ggml_cont(b.ctx(), first);
}

ggml_tensor * altup_states(builder & b, const model & of, ggml_tensor * x) {
    const int64_t n = of.hparams().n_altup - 1;
    ggml_tensor * more = ggml_repeat_4d(b.ctx(), x, x->ne[0], x->ne[1], n, 1);
    more = turned(b, more, of.frame()[role::altup_in], x);
    more = ggml_cont(b.ctx(), ggml_permute(b.ctx(), more, 0, 2, 1, 3));
    return ggml_concat(b.ctx(), ggml_reshape_3d(b.ctx(), x, x->ne[0], 1, x->ne[1]), more, 1);
}

ggml_tensor * altup_guess(builder & b, const model & of, uint32_t layer, ggml_tensor * states) {
    const int64_t n = states->ne[1];
    ggml_tensor * coefficients = shares(b, of, layer, altup_active(b, states));
    coefficients = b.product(coefficients, of.layers()[layer][role::altup_guess]);
    coefficients = ggml_reshape_3d(b.ctx(), coefficients, n, n, states->ne[2]);
    ggml_tensor * by_state = ggml_cont(b.ctx(), ggml_permute(b.ctx(), states, 1, 0, 2, 3)); // (n_altup, n_embd, n_tokens)
    return ggml_add(b.ctx(), ggml_mul_mat(b.ctx(), by_state, coefficients), states);
}

ggml_tensor * altup_corrected(builder & b, const model & of, uint32_t layer, ggml_tensor * guess, ggml_tensor * y) {
    const int64_t n_embd = guess->ne[0];
    const int64_t n = guess->ne[2];
    ggml_tensor * coefficients = b.product(shares(b, of, layer, y), of.layers()[layer][role::altup_correction]);
    coefficients = ggml_reshape_3d(b.ctx(), ggml_scale_bias(b.ctx(), coefficients, 1.0f, 1.0f), 1, guess->ne[1], n);
    ggml_tensor * news = ggml_reshape_3d(b.ctx(), ggml_sub(b.ctx(), y, altup_active(b, guess)), n_embd, 1, n);
    news = ggml_repeat_4d(b.ctx(), news, n_embd, guess->ne[1], n, 1);
    return ggml_add(b.ctx(), ggml_mul(b.ctx(), news, coefficients), guess);
}

ggml_tensor * altup_with_own(builder & b, const model & of, uint32_t layer, ggml_tensor * states, ggml_tensor * own) {
    ggml_tensor * active = altup_active(b, states);
    ggml_tensor * scaled = ggml_mul(b.ctx(), active, of.layers()[layer][role::altup_correction_scale]);
    ggml_tensor * made = made_of_layer_embedding(b, of, layer, scaled, own);
    made = ggml_reshape_3d(b.ctx(), made, made->ne[0], 1, made->ne[1]);
    ggml_tensor * rest = ggml_add(b.ctx(), others(b, states), made);
    return ggml_concat(b.ctx(), ggml_reshape_3d(b.ctx(), active, active->ne[0], 1, active->ne[1]), rest, 1);
}

ggml_tensor * altup_merged(builder & b, const model & of, ggml_tensor * states) {
    ggml_tensor * active = altup_active(b, states);
    ggml_tensor * rest = ggml_cont(b.ctx(), ggml_permute(b.ctx(), others(b, states), 0, 2, 1, 3)); // (n_embd, n_tokens, n)
    rest = turned(b, rest, of.frame()[role::altup_out], active);
    ggml_tensor * sum = active;
    for (int64_t i = 0; i < rest->ne[2]; ++i) {
        const size_t begin = static_cast<size_t>(i) * rest->nb[2];
        sum = ggml_add(b.ctx(), sum, ggml_view_2d(b.ctx(), rest, rest->ne[0], rest->ne[1], rest->nb[1], begin));
    }
    return ggml_scale(b.ctx(), sum, 1.0f / static_cast<float>(states->ne[1]));
}

ggml_tensor * laurel(builder & b, const model & of, uint32_t layer, ggml_tensor * x) {
    const role_tensors & w = of.layers()[layer];
    ggml_tensor * y = b.product(b.product(x, w[role::laurel_down]), w[role::laurel_up]);
    return ggml_add(b.ctx(), norm(b, of.hparams().norm, y, w[role::laurel_norm], of.hparams().norm_eps), x);
}

} // namespace kvg
