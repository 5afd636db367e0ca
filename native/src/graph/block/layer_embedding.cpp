#include "graph/block/layer_embedding.h"

#include <cmath>

#include "device.h"
#include "graph/block/norm.h"

namespace kvg {

ggml_tensor * layer_embeddings(builder & b, const model & of, ggml_tensor * tokens, ggml_tensor * x) {
    const struct hparams & h = of.hparams();
    const role_tensors & w = of.frame();
    const int64_t n = tokens->ne[0];
    ggml_tensor * found = ggml_get_rows(b.ctx(), w[role::layer_embd], tokens);
    b.wish(cpu_device());
    found = ggml_scale(b.ctx(), found, std::sqrt(static_cast<float>(h.n_embd_layer)));
    found = ggml_reshape_3d(b.ctx(), found, h.n_embd_layer, h.n_layer(), n);
    ggml_tensor * made = b.product(x, w[role::layer_embd_proj]);
    made = ggml_scale(b.ctx(), made, 1.0f / std::sqrt(static_cast<float>(h.n_embd)));
    made = ggml_reshape_3d(b.ctx(), made, h.n_embd_layer, h.n_layer(), n);
    made = norm(b, of.hparams().norm, made, w[role::layer_embd_norm], h.norm_eps);
    ggml_tensor * sum = ggml_scale(b.ctx(), ggml_add(b.ctx(), made, found), 1.0f / std::sqrt(2.0f));
    sum = ggml_cont(b.ctx(), ggml_permute(b.ctx(), sum, 0, 2, 1, 3));
    b.wish(of.placement().layer(0));
    return sum;
}

ggml_tensor * embedding_of_layer(builder & b, ggml_tensor * all, uint32_t layer) {
    return ggml_view_2d(b.ctx(), all, all->ne[0], all->ne[1], all->nb[1], layer * all->nb[2]);
}

ggml_tensor * made_of_layer_embedding(builder & b, const model & of, uint32_t layer, ggml_tensor * x, ggml_tensor * own) {
    const role_tensors & w = of.layers()[layer];
    ggml_tensor * y = ggml_gelu(b.ctx(), b.product(x, w[role::embd_gate]));
    y = b.product(ggml_mul(b.ctx(), y, own), w[role::embd_proj]);
    return norm(b, of.hparams().norm, y, w[role::embd_post_norm], of.hparams().norm_eps);
}

} // namespace kvg
