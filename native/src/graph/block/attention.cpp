#include "graph/block/attention.h"

#include "model/rope.h"

namespace kvg {

ggml_tensor * attention_block::build(builder & b, ggml_tensor * x) const {
    const layer_spec & spec = of.hparams().layers[layer];
    const layer_weights & w = of.layers()[layer];
    const kv_part & part = cells.part_of(layer);
    const int64_t n = x->ne[1];
    ggml_backend_dev_t device = of.placement().layer(layer);
    ggml_tensor * factors = of.rope_factors(layer, device);
    const auto rotated = [&](ggml_tensor * heads) {
        return spec.rope.n_rot > 0 ? rope(b.ctx(), heads, positions, factors, spec.rope, false) : heads;
    };
    const auto heads_of = [&](role weight, role bias, uint32_t n_head) {
        return ggml_reshape_3d(b.ctx(), b.linear(x, w[weight], w[bias]), spec.head_dim_k, n_head, n);
    };

    ggml_tensor * k = rotated(heads_of(role::wk, role::wk_bias, spec.n_head_kv));
    ggml_tensor * v = b.linear(x, w[role::wv], w[role::wv_bias]);
    b.wish(device);
    if (part.hadamard_k) {
        k = part.hadamard_k->apply(b.ctx(), k);
    }
    if (part.hadamard_v) {
        v = part.hadamard_v->apply(b.ctx(), v);
    }
    // attention reads views of these nodes, not of the cache's tensors: that makes write-before-read an edge of the graph
    ggml_tensor * k_all = ggml_set_rows(b.ctx(), cells.k(layer), ggml_reshape_2d(b.ctx(), k, spec.k_width(), n), in.slots);
    ggml_tensor * v_all = ggml_set_rows(b.ctx(), cells.v(layer), v, in.slots);
    b.root(k_all);
    b.root(v_all);
    b.wish(part.device);
    if (!attends) {
        return nullptr;
    }
    ggml_tensor * q = rotated(heads_of(role::wq, role::wq_bias, spec.n_head));
    b.wish(device);
    if (part.hadamard_k) {
        q = part.hadamard_k->apply(b.ctx(), q);
    }
    ggml_tensor * heads = attention(b.ctx(), how, q, cells.k_heads(b.ctx(), k_all, span.begin, span.n),
                                    cells.v_heads(b.ctx(), v_all, span.begin, span.n), in.mask, /*sinks*/ nullptr);
    if (part.hadamard_v) {
        heads = part.hadamard_v->apply(b.ctx(), heads);
    }
    b.wish(part.device);
    return heads;
}

} // namespace kvg
