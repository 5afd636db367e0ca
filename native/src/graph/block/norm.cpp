#include "graph/block/norm.h"

namespace kvg {

ggml_tensor * normalized(builder & b, norm_kind kind, ggml_tensor * x, float eps) {
    switch (kind) {
    case norm_kind::rms:
        return ggml_rms_norm(b.ctx(), x, eps);
    }
    return nullptr;
}

ggml_tensor * norm(builder & b, norm_kind kind, ggml_tensor * x, ggml_tensor * weight, float eps) {
    return weight ? ggml_mul(b.ctx(), normalized(b, kind, x, eps), weight) : x;
}

} // namespace kvg
