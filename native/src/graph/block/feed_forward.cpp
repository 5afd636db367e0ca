#include "graph/block/feed_forward.h"

#include <cmath>
#include <limits>

#include "graph/block/norm.h"
#include "graph/expert_product.h"
#include "graph/gate.h"
#include "graph/rounding.h"
#include "graph/router.h"

namespace kvg {

namespace {

// GGML_GLU_OP_COUNT: it isn't a gate.
ggml_glu_op glu_of(activation_kind kind) {
    switch (kind) {
    case activation_kind::swiglu:
        return GGML_GLU_OP_SWIGLU;
    case activation_kind::geglu:
        return GGML_GLU_OP_GEGLU;
    case activation_kind::swiglu_oai:
        return GGML_GLU_OP_SWIGLU_OAI;
    case activation_kind::reglu:
        return GGML_GLU_OP_REGLU;
    default:
        return GGML_GLU_OP_COUNT;
    }
}

ggml_tensor * activate(builder & b, const feed_forward_spec & spec, ggml_tensor * gate, ggml_tensor * up) {
    switch (spec.activation) {
    case activation_kind::swiglu:
    case activation_kind::geglu:
    case activation_kind::reglu:
        return ggml_glu_split(b.ctx(), gate, up, glu_of(spec.activation));
    case activation_kind::swiglu_oai:
        return ggml_swiglu_oai(b.ctx(), gate, up, OAI_ALPHA, OAI_LIMIT);
    case activation_kind::relu_sqr:
        return ggml_sqr(b.ctx(), ggml_relu(b.ctx(), up));
    case activation_kind::gelu:
        return ggml_gelu(b.ctx(), up);
    case activation_kind::xielu:
        return ggml_xielu(b.ctx(), up, spec.xielu.alpha_n, spec.xielu.alpha_p, spec.xielu.beta, spec.xielu.eps);
    }
    return nullptr;
}

// Here libllama multiplies the bias by the scale, too.
ggml_tensor * linear(builder & b, const role_tensors & w, role weight, role bias, ggml_tensor * x) {
    ggml_tensor * y = b.linear(x, w[weight], nullptr, w[bias]);
    return w.scale(weight) ? ggml_mul(b.ctx(), y, w.scale(weight)) : y;
}

// How far each number is above its row's mean and `cutoff` standard deviations; 0 for those below.
ggml_tensor * above(builder & b, ggml_tensor * x, float cutoff) {
    ggml_tensor * mean = ggml_mean(b.ctx(), x);
    ggml_tensor * squares = ggml_sum_rows(b.ctx(), ggml_sqr(b.ctx(), ggml_sub(b.ctx(), x, mean)));
    ggml_tensor * deviation = ggml_sqrt(b.ctx(), ggml_scale(b.ctx(), squares, 1.0f / static_cast<float>(x->ne[0] - 1)));
    ggml_tensor * bound = ggml_add(b.ctx(), mean, ggml_scale(b.ctx(), deviation, cutoff));
    return ggml_relu(b.ctx(), ggml_sub(b.ctx(), x, bound));
}

ggml_tensor * dense(builder & b, const feed_forward_spec & spec, const role_tensors & w, ggml_tensor * x, float eps) {
    ggml_tensor * gated = nullptr;
    if (ggml_tensor * both = w[role::ffn_gate_up]) {
        ggml_tensor * halves = b.linear(x, both, w.scale(role::ffn_gate_up), w[role::ffn_gate_up_bias]);
        const bool by_gelu = spec.activation == activation_kind::geglu; // there are two kinds that files have so
        gated = by_gelu ? ggml_geglu(b.ctx(), halves) : ggml_swiglu(b.ctx(), halves);
    } else {
        b.together(x, {w[role::ffn_gate], w[role::ffn_up]});
        ggml_tensor * gate = w[role::ffn_gate] ? linear(b, w, role::ffn_gate, role::ffn_gate_bias, x) : nullptr;
        gate = spec.gate_cutoff > 0.0f ? above(b, gate, spec.gate_cutoff) : gate;
        ggml_tensor * up = linear(b, w, role::ffn_up, role::ffn_up_bias, x);
        gated = activate(b, spec, gate, up);
    }
    gated = norm(b, norm_kind::rms, gated, w[role::ffn_sub_norm], eps);
    return linear(b, w, role::ffn_down, role::ffn_down_bias, gated);
}

// For each token: which experts it goes to, I32 (n_expert_used, n_tokens), and what each of their results is multiplied by.
struct choice {
    ggml_tensor * experts;
    ggml_tensor * weights; // (1, n_expert_used, n_tokens)
};

// The numbers of experts in the groups whose best two add up to most; of others -infinity. scores: (n_expert, n_tokens)
ggml_tensor * of_best_groups(builder & b, const feed_forward_spec & spec, ggml_tensor * scores) {
    const int64_t n = scores->ne[1];
    const int64_t n_in_group = spec.n_expert / spec.n_group;
    ggml_tensor * groups = ggml_reshape_3d(b.ctx(), scores, n_in_group, spec.n_group, n);
    ggml_tensor * best = ggml_argsort_top_k(b.ctx(), groups, 2);
    best = ggml_get_rows(b.ctx(), ggml_reshape_4d(b.ctx(), groups, 1, n_in_group, spec.n_group, n), best);
    best = ggml_sum_rows(b.ctx(), ggml_reshape_3d(b.ctx(), best, 2, spec.n_group, n));
    best = ggml_argsort_top_k(b.ctx(), ggml_reshape_2d(b.ctx(), best, spec.n_group, n), static_cast<int>(spec.n_group_used));
    ggml_tensor * kept = ggml_get_rows(b.ctx(), groups, best);
    ggml_tensor * none = ggml_fill(b.ctx(), groups, -std::numeric_limits<float>::infinity());
    return ggml_reshape_2d(b.ctx(), ggml_set_rows(b.ctx(), none, kept, best), spec.n_expert, n);
}

// Whether experts are chosen and weighed by our own operations: by a softmax, and by nothing else.
bool is_chosen_here(const feed_forward_spec & spec, const role_tensors & w) {
    return spec.gating != gating_kind::sigmoid && !w[role::expert_choice_bias] && spec.n_group == 0;
}

choice choose(builder & b, const feed_forward_spec & spec, const role_tensors & w, ggml_tensor * x) {
    const int64_t n = x->ne[1];
    ggml_tensor * router = w[role::router];
    const bool is_ours = is_router_here(router, x);
    ggml_tensor * bias_of_router = w[role::router_bias];
    ggml_tensor * scores = is_ours ? b.adapted(called_as(expert_scores(b.ctx(), router, bias_of_router, x), router), x, router)
                                   : b.linear(x, router, nullptr, bias_of_router); // (n_expert, n_tokens)
    if (is_ours && is_chosen_here(spec, w)) {
        ggml_tensor * experts = best_experts(b.ctx(), scores, spec.n_expert_used);
        ggml_tensor * weights = weights_of_experts(b.ctx(), scores, experts, spec);
        return {experts, ggml_reshape_3d(b.ctx(), weights, 1, spec.n_expert_used, n)};
    }
    if (spec.gating == gating_kind::softmax) {
        scores = ggml_soft_max(b.ctx(), scores);
    } else if (spec.gating == gating_kind::sigmoid) {
        scores = ggml_sigmoid(b.ctx(), scores);
    }
    ggml_tensor * bias = w[role::expert_choice_bias];
    ggml_tensor * ranked = bias ? ggml_add(b.ctx(), scores, bias) : scores;
    ranked = spec.n_group > 0 ? of_best_groups(b, spec, ranked) : ranked;
    ggml_tensor * experts = ggml_argsort_top_k(b.ctx(), ranked, static_cast<int>(spec.n_expert_used));
    ggml_tensor * weights = ggml_get_rows(b.ctx(), ggml_reshape_3d(b.ctx(), scores, 1, spec.n_expert, n), experts);
    weights = ggml_reshape_2d(b.ctx(), weights, spec.n_expert_used, n);
    if (spec.gating == gating_kind::softmax_of_chosen) {
        weights = ggml_soft_max(b.ctx(), weights);
    } else if (spec.sums_to_1) {
        ggml_tensor * sum = ggml_clamp(b.ctx(), ggml_sum_rows(b.ctx(), weights), SMALLEST_SUM_OF_WEIGHTS,
                                       std::numeric_limits<float>::infinity());
        weights = ggml_div(b.ctx(), weights, sum);
    }
    weights = spec.expert_scale > 0.0f ? ggml_scale(b.ctx(), weights, spec.expert_scale) : weights;
    return {experts, ggml_reshape_3d(b.ctx(), weights, 1, spec.n_expert_used, n)};
}

// Each token's product with the matrices of its experts. x (n_in, n_expert_used or 1, n_tokens)
ggml_tensor * expert_linear(builder & b, const role_tensors & w, role weight, role bias, ggml_tensor * x,
                            ggml_tensor * experts) {
    ggml_tensor * y = b.experts(x, w[weight], w.scale(weight), experts);
    return w[bias] ? ggml_add_id(b.ctx(), y, w[bias], experts) : y;
}

// x (n_embd, 1, n_tokens); returns (n_ff_expert, n_expert_used, n_tokens)
ggml_tensor * gated_by_experts(builder & b, const feed_forward_spec & spec, const role_tensors & w, ggml_tensor * x,
                               ggml_tensor * experts) {
    if (!w[role::expert_gate_up]) {
        ggml_tensor * gate =
            w[role::expert_gate] ? expert_linear(b, w, role::expert_gate, role::expert_gate_bias, x, experts) : nullptr;
        ggml_tensor * up = expert_linear(b, w, role::expert_up, role::expert_up_bias, x, experts);
        return activate(b, spec, gate, up);
    }
    ggml_tensor * both = b.experts(x, w[role::expert_gate_up], nullptr, experts);
    const auto half = [&](size_t which) {
        return ggml_view_3d(b.ctx(), both, spec.n_ff_expert, both->ne[1], both->ne[2], both->nb[1], both->nb[2],
                            which * spec.n_ff_expert * both->nb[0]);
    };
    ggml_tensor * gate = half(0);
    return activate(b, spec, gate, half(1));
}

// Gate and up: rows of one matrix, or two matrices.
std::pair<expert_matrix, expert_matrix> gates_and_ups(builder & b, const feed_forward_spec & spec, const role_tensors & w) {
    if (ggml_tensor * both = w[role::expert_gate_up]) {
        const auto half = [&](size_t which) {
            return ggml_view_3d(b.ctx(), both, both->ne[0], spec.n_ff_expert, both->ne[2], both->nb[1], both->nb[2],
                                which * spec.n_ff_expert * both->nb[1]);
        };
        ggml_tensor * gate = half(0);
        return {{gate}, {half(1)}};
    }
    return {{w[role::expert_gate], w.scale(role::expert_gate), w[role::expert_gate_bias]},
            {w[role::expert_up], w.scale(role::expert_up), w[role::expert_up_bias]}};
}

// All that experts do by our own products, whose results stay in the order of experts until they are added up; nullptr: ggml does
// a part of it. weights: what results are multiplied by, or nullptr
ggml_tensor * in_order(builder & b, const feed_forward_spec & spec, const role_tensors & w, ggml_tensor * x,
                       ggml_tensor * experts, ggml_tensor * weights) {
    const auto form = [&](role which) -> const row_form * {
        return w[which] && !b.adapts(w[which]) ? form_of_experts(w[which], x) : nullptr;
    };
    const gate_function gate = gate_of(glu_of(spec.activation));
    const row_form * of_down = form(role::expert_down);
    const role up = w[role::expert_gate_up] ? role::expert_gate_up : role::expert_up;
    const row_form * of_x = form(up);
    const bool one_form = up == role::expert_gate_up || form(role::expert_gate) == of_x;
    if (!gate || !of_down || !of_x || !one_form) {
        return nullptr;
    }
    ggml_tensor * order = b.order_of(experts, spec.n_expert);
    const auto [gates, ups] = gates_and_ups(b, spec, w);
    ggml_tensor * rows = rounded_in_order(b.ctx(), x, experts, order, *of_x);
    ggml_tensor * y = gate_in_order(b.ctx(), gates, ups, rows, order, gate);
    rows = rounded(b.ctx(), called_as(y, w[up]), *of_down);
    const expert_matrix down = {w[role::expert_down], w.scale(role::expert_down), w[role::expert_down_bias]};
    y = called_as(multiply_in_order(b.ctx(), down, rows, order), down.weight);
    return sum_by_tokens(b.ctx(), y, experts, order, weights);
}

// routed: what the router sees
ggml_tensor * mixture(builder & b, const feed_forward_spec & spec, const role_tensors & w, ggml_tensor * x,
                      ggml_tensor * routed) {
    const auto [experts, weights] = choose(b, spec, w, routed);
    const int64_t n = x->ne[1];
    x = ggml_reshape_3d(b.ctx(), x, x->ne[0], 1, n);
    x = spec.weighs_input ? ggml_mul(b.ctx(), ggml_repeat_4d(b.ctx(), x, x->ne[0], spec.n_expert_used, n, 1), weights) : x;
    if (ggml_tensor * sum = in_order(b, spec, w, x, experts, spec.weighs_input ? nullptr : weights)) {
        return sum;
    }
    ggml_tensor * y = gated_by_experts(b, spec, w, x, experts);
    y = expert_linear(b, w, role::expert_down, role::expert_down_bias, y, experts);
    y = spec.weighs_input ? y : ggml_mul(b.ctx(), y, weights); // (n_embd, n_expert_used, n_tokens)
    ggml_tensor * sum = nullptr;
    for (size_t i = 0; i < spec.n_expert_used; ++i) {
        ggml_tensor * of_one = ggml_view_2d(b.ctx(), y, y->ne[0], n, y->nb[2], i * y->nb[1]);
        sum = sum ? ggml_add(b.ctx(), sum, of_one) : of_one;
    }
    return spec.n_expert_used == 1 ? ggml_cont(b.ctx(), sum) : sum;
}

// Experts that see what a matrix makes of x, if the layer has it so.
ggml_tensor * mixture_of_latents(builder & b, const feed_forward_spec & spec, const role_tensors & w, ggml_tensor * x,
                                 ggml_tensor * routed) {
    x = w[role::expert_latent_down] ? b.product(x, w[role::expert_latent_down]) : x;
    ggml_tensor * y = mixture(b, spec, w, x, routed);
    return w[role::expert_latent_up] ? b.product(y, w[role::expert_latent_up]) : y;
}

// What an expert that every token goes to adds, multiplied by a gate of its own where it has one.
ggml_tensor * add_shared(builder & b, const feed_forward_spec & spec, const role_tensors & w, ggml_tensor * x,
                         ggml_tensor * y) {
    if (spec.n_ff_shared == 0) {
        return y;
    }
    const auto product = [&](role weight, ggml_tensor * in) { return b.linear(in, w[weight], w.scale(weight), nullptr); };
    ggml_tensor * gated = nullptr;
    if (w[role::shared_gate_up]) {
        gated = ggml_swiglu(b.ctx(), product(role::shared_gate_up, x));
    } else {
        b.together(x, {w[role::shared_gate], w[role::shared_up]});
        ggml_tensor * gate = w[role::shared_gate] ? product(role::shared_gate, x) : nullptr;
        gated = activate(b, spec, gate, product(role::shared_up, x));
    }
    ggml_tensor * out = product(role::shared_down, gated);
    if (ggml_tensor * router = w[role::shared_router]) {
        out = ggml_mul(b.ctx(), out, ggml_sigmoid(b.ctx(), b.product(x, router)));
    }
    return ggml_add(b.ctx(), y, out);
}

// A dense feed-forward and experts, each with its norms; the router has its own, or experts see what the layer begins with.
ggml_tensor * dense_and_mixture(builder & b, const hparams & h, const feed_forward_spec & spec, const role_tensors & w,
                                ggml_tensor * in, ggml_tensor * x, ggml_tensor * first) {
    const float eps = h.norm_eps;
    ggml_tensor * y = norm(b, h.norm, dense(b, spec, w, in, eps), w[role::dense_post_norm], eps);
    ggml_tensor * mixed = nullptr;
    if (w[role::router_scale]) {
        ggml_tensor * routed =
            ggml_scale(b.ctx(), normalized(b, h.norm, x, eps), 1.0f / std::sqrt(static_cast<float>(x->ne[0])));
        routed = ggml_mul(b.ctx(), routed, w[role::router_scale]);
        mixed = mixture(b, spec, w, norm(b, h.norm, x, w[role::expert_norm], eps), routed);
    } else {
        ggml_tensor * seen = spec.experts_first ? norm(b, h.norm, first, w[role::expert_norm], eps) : in;
        mixed = mixture(b, spec, w, seen, seen);
    }
    return ggml_add(b.ctx(), y, norm(b, h.norm, mixed, w[role::expert_post_norm], eps));
}

} // namespace

ggml_tensor * feed_forward(builder & b, const model & of, uint32_t layer, ggml_tensor * x, ggml_tensor * first) {
    const struct hparams & h = of.hparams();
    const feed_forward_spec & spec = h.layers[layer].feed_forward;
    const role_tensors & w = of.layers()[layer];
    ggml_tensor * in = norm_of_model(b, h, x, w[role::ffn_norm], w[role::ffn_norm_bias]);
    ggml_tensor * y = nullptr;
    if (spec.n_expert == 0) {
        y = dense(b, spec, w, in, h.norm_eps);
    } else if (spec.n_ff == 0) {
        y = add_shared(b, spec, w, in, mixture_of_latents(b, spec, w, in, spec.routes_first ? first : in));
    } else {
        y = dense_and_mixture(b, h, spec, w, in, x, first);
    }
    y = spec.sum_scale > 0.0f ? ggml_scale(b.ctx(), y, spec.sum_scale) : y;
    return norm(b, h.norm, y, w[role::ffn_post_norm], h.post_norm_eps);
}

} // namespace kvg
