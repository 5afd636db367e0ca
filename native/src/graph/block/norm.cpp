#include "graph/block/norm.h"

namespace kvg {

ggml_tensor * norm(builder & b, norm_kind kind, ggml_tensor * x, ggml_tensor * weight, float eps) {
    if (!weight) {
        return x;
    }
    switch (kind) {
    case norm_kind::rms:
        x = ggml_rms_norm(b.ctx(), x, eps);
        break;
    }
    return ggml_mul(b.ctx(), x, weight);
}

} // namespace kvg
