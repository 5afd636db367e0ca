#include "graph/block/state.h"

#include <ggml-backend.h>

#include "graph/block/norm.h"

namespace kvg {

namespace {

// (width, n_tokens), a part of each token's numbers
ggml_tensor * columns(builder & b, ggml_tensor * x, int64_t begin, int64_t width) {
    return ggml_view_2d(b.ctx(), x, width, x->ne[1], x->nb[1], static_cast<size_t>(begin) * sizeof(float));
}

// (head_dim, n_head, n_tokens), so too
ggml_tensor * heads(builder & b, ggml_tensor * x, int64_t begin, int64_t head_dim, int64_t n_head) {
    return ggml_view_3d(b.ctx(), x, head_dim, n_head, x->ne[1], static_cast<size_t>(head_dim) * sizeof(float), x->nb[1],
                        static_cast<size_t>(begin) * sizeof(float));
}

} // namespace

// Whether results are gated where states are, on the CPU: what comes behind them is there, too.
bool state_block::gates_here() const {
    const ggml_tensor * weight = weights()[role::state_norm];
    return own && weight && of.hparams().norm == norm_kind::rms && ggml_backend_buffer_is_host(weight->buffer);
}

ggml_tensor * state_block::product(builder & b, ggml_tensor * x, role weight) const {
    return b.linear(x, weights()[weight], weights().scale(weight), nullptr);
}

ggml_tensor * state_block::build(builder & b, ggml_tensor * x) const {
    switch (spec().kind) {
    case state_kind::none:
        break;
    case state_kind::short_conv:
        return short_conv(b, x);
    case state_kind::delta_net:
        return delta_net(b, x);
    case state_kind::mamba2:
        return mamba2(b, x);
    }
    return nullptr;
}

ggml_tensor * state_block::short_conv(builder & b, ggml_tensor * x) const {
    const int64_t n = spec().n_channels;
    ggml_tensor * all = product(b, x, role::state_in); // a gate before, a gate behind, and what is convolved
    ggml_tensor * in = ggml_mul(b.ctx(), columns(b, all, 0, n), columns(b, all, 2 * n, n));
    ggml_tensor * out = op.convolve(b, in, weights()[role::taps], nullptr);
    b.root(out);
    return gives ? ggml_mul(b.ctx(), out, columns(b, all, n, n)) : nullptr;
}

// How far a token moves the state.
struct state_block::step {
    ggml_tensor * decay; // (n_head, n_tokens): the logarithm of what stays
    ggml_tensor * beta;  // (n_head, n_tokens): the share of what is new
};

state_block::step state_block::step_of(builder & b, ggml_tensor * x) const {
    const role_tensors & w = weights();
    ggml_tensor * alpha = nullptr;
    ggml_tensor * beta = nullptr;
    if (w[role::state_beta_alpha]) { // for each head of K the beta, then the alpha, of its heads of V
        const int64_t n = spec().n_head / spec().n_head_k;
        ggml_tensor * both = product(b, x, role::state_beta_alpha);
        const auto half = [&](int64_t begin) {
            ggml_tensor * part =
                ggml_view_3d(b.ctx(), both, n, spec().n_head_k, both->ne[1], 2 * static_cast<size_t>(n) * sizeof(float),
                             both->nb[1], static_cast<size_t>(begin) * sizeof(float));
            return ggml_cont_2d(b.ctx(), part, spec().n_head, both->ne[1]);
        };
        beta = half(0);
        alpha = half(n);
    } else {
        beta = product(b, x, role::state_beta);
        alpha = spec().decays_by_width ? product(b, product(b, x, role::decay_down), role::decay_up)
                                       : product(b, x, role::state_alpha);
    }
    alpha = ggml_softplus(b.ctx(), ggml_add(b.ctx(), alpha, w[role::dt_bias]));
    if (spec().decays_by_width) {
        alpha = ggml_reshape_3d(b.ctx(), alpha, spec().head_dim_k, spec().n_head, x->ne[1]);
    }
    return {ggml_mul(b.ctx(), alpha, w[role::state_decay]), ggml_sigmoid(b.ctx(), beta)};
}

// Q, K and V of all heads, one after the other, and the gate of the results where one matrix makes both.
struct state_block::source {
    ggml_tensor * qkv;  // (n_channels, n_tokens)
    ggml_tensor * gate; // (v_width, n_tokens), or nullptr
};

state_block::source state_block::source_of(builder & b, ggml_tensor * x) const {
    const role_tensors & w = weights();
    const state_spec & s = spec();
    const auto joined = [&](ggml_tensor * q, ggml_tensor * k, ggml_tensor * v) {
        return ggml_concat(b.ctx(), ggml_concat(b.ctx(), q, k, 0), v, 0);
    };
    if (w[role::state_in]) {
        return {product(b, x, role::state_in), nullptr};
    }
    if (!w[role::state_in_gated]) {
        return {joined(product(b, x, role::state_q), product(b, x, role::state_k), product(b, x, role::state_v)), nullptr};
    }
    ggml_tensor * all = product(b, x, role::state_in_gated); // for each head of K: Q, K, and V and gate of its heads of V
    const int64_t v_rows = int64_t{s.head_dim_v} * (s.n_head / s.n_head_k);
    const int64_t stride = 2 * (int64_t{s.head_dim_k} + v_rows);
    const auto part = [&](int64_t begin, int64_t n) {
        ggml_tensor * rows = ggml_view_3d(b.ctx(), all, n, s.n_head_k, x->ne[1], static_cast<size_t>(stride) * sizeof(float),
                                          all->nb[1], static_cast<size_t>(begin) * sizeof(float));
        return ggml_cont_2d(b.ctx(), rows, n * s.n_head_k, x->ne[1]);
    };
    const int64_t k = s.head_dim_k;
    return {joined(part(0, k), part(k, k), part(2 * k, v_rows)), part(2 * k + v_rows, v_rows)};
}

ggml_tensor * state_block::taps_of(builder & b) const {
    const role_tensors & w = weights();
    if (w[role::taps]) {
        return w[role::taps];
    }
    ggml_tensor * all = ggml_concat(b.ctx(), ggml_concat(b.ctx(), w[role::taps_q], w[role::taps_k], 2), w[role::taps_v], 2);
    return ggml_reshape_2d(b.ctx(), all, spec().n_taps, spec().n_channels);
}

ggml_tensor * state_block::delta_net(builder & b, ggml_tensor * x) const {
    const role_tensors & w = weights();
    const state_spec & s = spec();
    const float eps = of.hparams().norm_eps;
    const source made = source_of(b, x);
    ggml_tensor * qkv = op.convolve(b, made.qkv, taps_of(b), nullptr);
    const step move = step_of(b, x);
    ggml_tensor * qk = op.to_unit(b, columns(b, qkv, 0, 2 * int64_t{s.k_width()}));
    ggml_tensor * q = heads(b, qk, 0, s.head_dim_k, s.n_head_k);
    ggml_tensor * k = heads(b, qk, s.k_width(), s.head_dim_k, s.n_head_k);
    ggml_tensor * v = heads(b, qkv, 2 * int64_t{s.k_width()}, s.head_dim_v, s.n_head);
    ggml_tensor * out = op.delta(b, q, k, v, move.decay, move.beta);
    b.root(out);
    if (!gives) {
        return nullptr;
    }
    ggml_tensor * gate = made.gate;
    if (!gate) {
        gate = s.decays_by_width ? product(b, product(b, x, role::gate_down), role::gate_up) : product(b, x, role::state_gate);
    }
    if (gates_here()) {
        return own->pass_gate(b, ggml_reshape_2d(b.ctx(), out, s.v_width(), x->ne[1]), gate, w[role::state_norm]);
    }
    gate = ggml_reshape_3d(b.ctx(), gate, s.head_dim_v, s.n_head, x->ne[1]);
    out = norm(b, of.hparams().norm, out, w[role::state_norm], eps);
    out = s.decays_by_width ? ggml_mul(b.ctx(), out, ggml_sigmoid(b.ctx(), gate)) : ggml_swiglu_split(b.ctx(), gate, out);
    return ggml_reshape_2d(b.ctx(), out, s.v_width(), x->ne[1]);
}

ggml_tensor * state_block::mamba2(builder & b, ggml_tensor * x) const {
    const role_tensors & w = weights();
    const state_spec & s = spec();
    const int64_t n = x->ne[1];
    ggml_tensor * all = product(b, x, role::state_in); // a gate, what is convolved, the time step
    ggml_tensor * vkq = op.convolve(b, columns(b, all, s.v_width(), s.n_channels), w[role::taps], w[role::taps_bias]);
    ggml_tensor * dt = columns(b, all, int64_t{s.v_width()} + s.n_channels, s.n_head);
    dt = ggml_add(b.ctx(), dt, w[role::dt_bias]);
    ggml_tensor * v = heads(b, vkq, 0, s.head_dim_v, s.n_head);
    ggml_tensor * k = heads(b, vkq, s.v_width(), s.head_dim_k, s.n_head_k);
    ggml_tensor * q = heads(b, vkq, int64_t{s.v_width()} + s.k_width(), s.head_dim_k, s.n_head_k);
    ggml_tensor * out =
        op.scan(b, q, k, v, dt, ggml_reshape_2d(b.ctx(), w[role::state_decay], 1, s.n_head), w[role::state_skip]);
    b.root(out);
    if (!gives) {
        return nullptr;
    }
    out = ggml_reshape_2d(b.ctx(), out, s.v_width(), n);
    if (gates_here()) {
        return own->pass_gate(b, out, columns(b, all, 0, s.v_width()), w[role::state_norm]);
    }
    out = ggml_swiglu_split(b.ctx(), ggml_cont(b.ctx(), columns(b, all, 0, s.v_width())), out);
    if (w[role::state_norm]) {
        out = ggml_reshape_3d(b.ctx(), out, s.v_width() / s.n_head_k, s.n_head_k, n);
        out = norm(b, of.hparams().norm, out, w[role::state_norm], of.hparams().norm_eps);
    }
    return ggml_reshape_2d(b.ctx(), out, s.v_width(), n);
}

} // namespace kvg
