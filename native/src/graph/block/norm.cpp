#include "graph/block/norm.h"

#include "graph/rms_norm.h"

namespace kvg {

ggml_tensor * normalized(builder & b, norm_kind kind, ggml_tensor * x, float eps) {
    switch (kind) {
    case norm_kind::rms:
        return ggml_rms_norm(b.ctx(), x, eps);
    case norm_kind::layer:
        return ggml_norm(b.ctx(), x, eps);
    }
    return nullptr;
}

ggml_tensor * norm(builder & b, norm_kind kind, ggml_tensor * x, ggml_tensor * weight, float eps, ggml_tensor * bias) {
    if (!weight) {
        return x;
    }
    ggml_tensor * y = kind == norm_kind::rms && is_normed_here(x, weight)
                          ? rms_norm(b.ctx(), x, weight, eps)
                          : ggml_mul(b.ctx(), normalized(b, kind, x, eps), weight);
    return bias ? ggml_add(b.ctx(), y, bias) : y;
}

ggml_tensor * norm_of_model(builder & b, const hparams & h, ggml_tensor * x, ggml_tensor * weight, ggml_tensor * bias) {
    return h.bare_norms ? normalized(b, h.norm, x, h.norm_eps) : norm(b, h.norm, x, weight, h.norm_eps, bias);
}

} // namespace kvg
