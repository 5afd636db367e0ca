// What a layer does with each token by itself.
#pragma once

#include "graph/builder.h"
#include "model/arch.h"

namespace kvg {

// x (n_embd, n_tokens); returns the same shape
ggml_tensor * feed_forward(builder & b, feed_forward_kind kind, const layer_weights & w, ggml_tensor * x);

} // namespace kvg
