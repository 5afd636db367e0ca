// What a layer does with each token by itself.
#pragma once

#include "graph/builder.h"
#include "model/weights.h"

namespace kvg {

// With the norms before and after it. x (n_embd, n_tokens); returns what is added to it. first: what the layer begins with, as x
ggml_tensor * feed_forward(builder & b, const model & of, uint32_t layer, ggml_tensor * x, ggml_tensor * first);

} // namespace kvg
