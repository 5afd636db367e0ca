#include "graph/block/attention.h"

#include "device.h"
#include "graph/roped.h"
#include "model/rope.h"

namespace kvg {

namespace {

// One of Q, K and V: its matrix and bias, its heads, and where it begins in a matrix that holds all three.
struct third {
    role weight;
    role bias;
    uint32_t head_dim;
    uint32_t n_head;
    uint32_t offset;
};

third third_of(const layer_spec & spec, role weight) {
    switch (weight) {
    case role::wq:
        return {weight, role::wq_bias, spec.q_rows() / spec.n_head, spec.n_head, 0};
    case role::wk:
        return {weight, role::wk_bias, spec.head_dim_k, spec.n_head_kv, spec.q_rows()};
    default:
        return {weight, role::wv_bias, spec.head_dim_v, spec.n_head_kv, spec.q_rows() + spec.k_width()};
    }
}

} // namespace

ggml_tensor * attention_block::heads_of(builder & b, const input & x, role weight) const {
    const role_tensors & w = of.layers()[layer];
    const third part = third_of(of.hparams().layers[layer], weight);
    const float bound = of.hparams().layers[layer].clamp_qkv;
    const auto within = [&](ggml_tensor * y) { // of a copy: ggml clamps in place
        return bound > 0.0f ? ggml_clamp(b.ctx(), ggml_cont(b.ctx(), y), -bound, bound) : y;
    };
    const int64_t n = x.normed->ne[1];
    if (!x.qkv) {
        ggml_tensor * y = b.linear(x.normed, w[weight], w.scale(weight), w[part.bias]);
        return within(ggml_reshape_3d(b.ctx(), y, part.head_dim, part.n_head, n));
    }
    const size_t head_bytes = part.head_dim * sizeof(float);
    ggml_tensor * y =
        ggml_view_3d(b.ctx(), x.qkv, part.head_dim, part.n_head, n, head_bytes, x.qkv->nb[1], part.offset * sizeof(float));
    if (ggml_tensor * bias = w[part.bias]) {
        y = ggml_add(b.ctx(), y, ggml_reshape_2d(b.ctx(), bias, part.head_dim, part.n_head));
    }
    return within(y);
}

// (head_dim_k, 1, n_tokens): the normed latent, and what lies behind it
ggml_tensor * attention_block::latent_k(builder & b, ggml_tensor * x) const {
    const role_tensors & w = of.layers()[layer];
    const layer_spec & spec = of.hparams().layers[layer];
    ggml_tensor * all = b.linear(x, w[role::latent_down], nullptr, nullptr);
    const auto part = [&](size_t begin, int64_t n) {
        return ggml_view_3d(b.ctx(), all, n, 1, x->ne[1], all->nb[1], all->nb[1], begin * sizeof(float));
    };
    ggml_tensor * latent = norm(b, of.hparams().norm, part(0, spec.head_dim_v), w[role::latent_norm], of.hparams().norm_eps);
    return ggml_concat(b.ctx(), latent, part(spec.head_dim_v, spec.latent.n_behind), 0);
}

// The dimensions of K that are rotated are the same in all heads.
attention_block::k_and_v attention_block::of_latent(builder & b, ggml_tensor * x) const {
    const role_tensors & w = of.layers()[layer];
    const layer_spec & spec = of.hparams().layers[layer];
    const int64_t n = x->ne[1];
    const int64_t n_rot = spec.rope.n_rot;
    const int64_t n_plain = spec.head_dim_k - n_rot;
    ggml_tensor * all = b.linear(x, w[role::latent_down], nullptr, nullptr);
    ggml_tensor * latent = ggml_view_2d(b.ctx(), all, spec.kv_rank, n, all->nb[1], 0);
    latent = norm(b, of.hparams().norm, latent, w[role::latent_norm], of.hparams().norm_eps);
    ggml_tensor * heads = b.linear(latent, w[role::latent_up], nullptr, nullptr);
    const size_t head_bytes = static_cast<size_t>(n_plain + spec.head_dim_v) * sizeof(float);
    const auto part = [&](int64_t begin, int64_t width) {
        return ggml_view_3d(b.ctx(), heads, width, spec.n_head_kv, n, head_bytes, heads->nb[1],
                            static_cast<size_t>(begin) * sizeof(float));
    };
    ggml_tensor * shared = ggml_view_3d(b.ctx(), all, n_rot, 1, n, all->nb[1], all->nb[1], spec.kv_rank * sizeof(float));
    shared = ggml_repeat_4d(b.ctx(), shared, n_rot, spec.n_head_kv, n, 1);
    return {ggml_concat(b.ctx(), part(0, n_plain), shared, 0), ggml_cont(b.ctx(), part(n_plain, spec.head_dim_v))};
}

// Queries of latents, (head_dim_k, n_head, n_tokens). q: (latent.head_dim, n_head, n_tokens)
ggml_tensor * attention_block::latent_q(builder & b, ggml_tensor * q) const {
    const latent_spec & latent = of.hparams().layers[layer].latent;
    const int64_t n_plain = latent.head_dim - latent.n_behind;
    const auto part = [&](int64_t begin, int64_t n) {
        return ggml_view_3d(b.ctx(), q, n, q->ne[1], q->ne[2], q->nb[1], q->nb[2], static_cast<size_t>(begin) * sizeof(float));
    };
    ggml_tensor * plain = ggml_permute(b.ctx(), part(0, n_plain), 0, 2, 1, 3);        // (n_plain, n_tokens, n_head)
    ggml_tensor * met = b.product_of_each(plain, of.layers()[layer][role::latent_k]); // (rank, n_tokens, n_head)
    return ggml_concat(b.ctx(), ggml_permute(b.ctx(), met, 0, 2, 1, 3), part(n_plain, latent.n_behind), 0);
}

// What heads gathered of latents, (n_head * rank, n_tokens), as V: (n_head * latent.head_dim_out, n_tokens).
ggml_tensor * attention_block::out_of_latents(builder & b, ggml_tensor * heads) const {
    const layer_spec & spec = of.hparams().layers[layer];
    const int64_t n = heads->ne[1];
    ggml_tensor * gathered = ggml_reshape_3d(b.ctx(), heads, spec.head_dim_v, spec.n_head, n);
    gathered = ggml_permute(b.ctx(), gathered, 0, 2, 1, 3);                            // (rank, n_tokens, n_head)
    ggml_tensor * v = b.product_of_each(gathered, of.layers()[layer][role::latent_v]); // (head_dim_out, n_tokens, n_head)
    return ggml_cont_2d(b.ctx(), ggml_permute(b.ctx(), v, 0, 2, 1, 3), spec.out_width(), n);
}

// Each head by itself, or all of a token's as one vector: the weight's width says which. heads: (head_dim, n_head, n_tokens)
ggml_tensor * attention_block::normed(builder & b, ggml_tensor * heads, role norm_weight) const {
    const role_tensors & w = of.layers()[layer];
    ggml_tensor * weight = w[norm_weight];
    ggml_tensor * bias = w[norm_weight == role::q_norm ? role::q_norm_bias : role::k_norm_bias];
    const int64_t width = heads->ne[0] * heads->ne[1];
    if (!weight || weight->ne[0] == heads->ne[0]) {
        return norm(b, of.hparams().norm, heads, weight, of.hparams().norm_eps, bias);
    }
    ggml_tensor * all =
        norm(b, of.hparams().norm, ggml_cont_2d(b.ctx(), heads, width, heads->ne[2]), weight, of.hparams().norm_eps, bias);
    return ggml_reshape_3d(b.ctx(), all, heads->ne[0], heads->ne[1], heads->ne[2]);
}

// The norm comes behind rope. K is stored without its norm's weight, and queries are multiplied by both weights: the scores are the same,
// and K can still be rotated to another position.
ggml_tensor * attention_block::normed_last(builder & b, ggml_tensor * heads, role norm_weight) const {
    const role_tensors & w = of.layers()[layer];
    heads = normalized(b, of.hparams().norm, rotated(b, heads), of.hparams().norm_eps);
    for (const role each : {role::q_norm, role::k_norm}) {
        heads = norm_weight == role::q_norm && w[each] ? ggml_mul(b.ctx(), heads, w[each]) : heads;
    }
    return heads;
}

ggml_tensor * attention_block::placed(builder & b, ggml_tensor * heads, role norm_weight) const {
    if (of.hparams().layers[layer].norm_last) {
        return normed_last(b, heads, norm_weight);
    }
    return rotated(b, normed(b, heads, norm_weight));
}

ggml_tensor * attention_block::rotated(builder & b, ggml_tensor * heads) const {
    const layer_spec & spec = of.hparams().layers[layer];
    if (spec.rope.n_rot == 0) { // they may be a part of the rows of Q, K and V
        return ggml_is_contiguous(heads) ? heads : ggml_cont(b.ctx(), heads);
    }
    const device_factors & factors = of.rope_factors(cells.cells().size());
    const ggml_backend_dev_t device = of.placement().layer(layer);
    const auto found = spec.rope.with_factors ? factors.find(device) : factors.end();
    ggml_tensor * own = found == factors.end() ? nullptr : found->second;
    if (is_cpu(device) && is_roped_here(heads, spec.rope)) {
        ggml_tensor * table = b.rope_table_of(positions, own, spec.rope);
        return roped(b.ctx(), heads, table, spec.rope);
    }
    return rope(b.ctx(), heads, positions, own, spec.rope, false, first_gain(spec.rope));
}

// v is nullptr where it is a part of k
attention_block::k_and_v attention_block::made_of(builder & b, const input & x) const {
    const layer_spec & spec = of.hparams().layers[layer];
    if (spec.latent.head_dim > 0) {
        return {latent_k(b, x.normed), nullptr};
    }
    if (spec.kv_rank > 0) {
        return of_latent(b, x.normed);
    }
    ggml_tensor * k = heads_of(b, x, role::wk);
    return {k, x.qkv || of.layers()[layer][role::wv] ? heads_of(b, x, role::wv) : k};
}

stored_rows attention_block::store(builder & b, const input & x) const {
    const layer_spec & spec = of.hparams().layers[layer];
    const kv_part & part = cells.part_of(layer);
    auto [k, v] = made_of(b, x);
    k = placed(b, k, role::k_norm);
    v = v && spec.norm_v ? normalized(b, of.hparams().norm, v, of.hparams().norm_eps) : v;
    b.wish(of.placement().layer(layer));
    if (part.hadamard_k) {
        k = part.hadamard_k->apply(b.ctx(), k);
    }
    if (v && part.hadamard_v) {
        v = part.hadamard_v->apply(b.ctx(), v);
    }
    // attention reads views of these nodes, not of the cache's tensors: that makes write-before-read an edge of the graph
    const auto write = [&](ggml_tensor * rows, ggml_tensor * heads, uint32_t width) {
        heads = ggml_view_2d(b.ctx(), heads, width, heads->ne[2], heads->nb[2], 0); // one head behind the other, in each token
        ggml_tensor * all = ggml_set_rows(b.ctx(), rows, heads, in.slots);
        b.root(all);
        return all;
    };
    ggml_tensor * stored_k = named(write(turn ? turn->k : cells.k(layer), k, spec.k_width()), "k_cells", layer);
    ggml_tensor * stored_v = v ? named(write(turn ? turn->v : cells.v(layer), v, spec.v_width()), "v_cells", layer) : stored_k;
    const stored_rows all = {stored_k, stored_v};
    b.wish(part.reader);
    return all;
}

// What queries are made of, which may come by way of a smaller width.
attention_block::input attention_block::query_input(builder & b, const input & x) const {
    const role_tensors & w = of.layers()[layer];
    if (!w[role::q_down]) {
        return x;
    }
    ggml_tensor * small = b.linear(x.normed, w[role::q_down], nullptr, nullptr);
    return {norm(b, of.hparams().norm, small, w[role::q_down_norm], of.hparams().norm_eps), nullptr};
}

ggml_tensor * attention_block::behind_gate(builder & b, ggml_tensor * heads, ggml_tensor * x) const {
    const layer_spec & spec = of.hparams().layers[layer];
    ggml_tensor * gate = b.linear(x, of.layers()[layer][role::attn_gate], nullptr, nullptr);
    gate = spec.gate_softplus ? ggml_softplus(b.ctx(), gate) : ggml_sigmoid(b.ctx(), gate);
    if (gate->ne[0] == heads->ne[0]) {
        return ggml_mul(b.ctx(), heads, gate);
    }
    const int64_t n = heads->ne[1];
    ggml_tensor * by_head = ggml_reshape_3d(b.ctx(), heads, heads->ne[0] / spec.n_head, spec.n_head, n);
    by_head = ggml_mul(b.ctx(), by_head, ggml_reshape_3d(b.ctx(), gate, 1, spec.n_head, n));
    return ggml_reshape_2d(b.ctx(), by_head, heads->ne[0], n);
}

ggml_tensor * attention_block::build(builder & b, ggml_tensor * x) const {
    const role_tensors & w = of.layers()[layer];
    const uint32_t owner = of.hparams().layers[layer].kv_from;
    const kv_part & part = cells.part_of(owner);
    input in_here = {x, nullptr};
    if (w[role::wqkv]) {
        in_here.qkv = b.linear(x, w[role::wqkv], w.scale(role::wqkv), w[role::wqkv_bias]);
    }
    const layer_spec & spec = of.hparams().layers[layer];
    const bool stores = owner == layer && !spec.of_target;
    const bool makes_heads = stores && spec.latent.head_dim == 0 && spec.kv_rank == 0;
    b.together(x, {attends && !w[role::q_down] ? w[role::wq] : nullptr, makes_heads ? w[role::wk] : nullptr,
                   makes_heads ? w[role::wv] : nullptr});
    if (stores) {
        rows = store(b, in_here);
    }
    if (!attends) {
        return nullptr;
    }
    const stored_rows read = spec.of_target ? stored_rows{cells.k(owner), cells.v(owner)} : rows;
    ggml_tensor * q = heads_of(b, query_input(b, in_here), role::wq);
    ggml_tensor * gate = nullptr;
    if (spec.gated) {
        const auto half = [&](size_t begin) {
            return ggml_view_3d(b.ctx(), q, spec.head_dim_k, spec.n_head, q->ne[2], q->nb[1], q->nb[2], begin * sizeof(float));
        };
        gate = half(spec.head_dim_k);
        q = half(0);
    }
    q = spec.latent.head_dim > 0 ? latent_q(b, q) : q;
    q = placed(b, q, role::q_norm);
    q = spec.tempered ? ggml_mul(b.ctx(), q, temperatures) : q;
    b.wish(of.placement().layer(layer));
    if (part.hadamard_k) {
        q = part.hadamard_k->apply(b.ctx(), q);
    }
    ggml_tensor * heads = attention(b.ctx(), how, q, cells.k_heads(b.ctx(), read.k, span.begin, span.n),
                                    cells.v_heads(b.ctx(), read.v, span.begin, span.n), in.mask, w[role::sinks]);
    // a trace prints no views
    named(heads->view_src ? heads->view_src : heads, "attention", layer);
    if (const hadamard * mixed = spec.v_in_k() > 0 ? part.hadamard_k.get() : part.hadamard_v.get()) {
        heads = mixed->apply(b.ctx(), heads);
    }
    b.wish(part.reader);
    heads = spec.latent.head_dim > 0 ? out_of_latents(b, heads) : heads;
    heads = w[role::attn_gate] ? behind_gate(b, heads, x) : heads;
    heads = norm(b, of.hparams().norm, heads, w[role::attn_sub_norm], of.hparams().norm_eps);
    return gate
               ? ggml_mul(b.ctx(), heads,
                          ggml_reshape_2d(b.ctx(), ggml_sigmoid(b.ctx(), ggml_cont(b.ctx(), gate)), heads->ne[0], heads->ne[1]))
               : heads;
}

} // namespace kvg
