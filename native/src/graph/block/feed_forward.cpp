#include "graph/block/feed_forward.h"

namespace kvg {

ggml_tensor * feed_forward(builder & b, feed_forward_kind kind, const layer_weights & w, ggml_tensor * x) {
    ggml_tensor * gate = b.linear(x, w[role::ffn_gate], w[role::ffn_gate_bias]);
    ggml_tensor * up = b.linear(x, w[role::ffn_up], w[role::ffn_up_bias]);
    ggml_tensor * gated = nullptr;
    switch (kind) {
    case feed_forward_kind::swiglu:
        gated = ggml_swiglu_split(b.ctx(), gate, up);
        break;
    }
    return b.linear(gated, w[role::ffn_down], w[role::ffn_down_bias]);
}

} // namespace kvg
