// What a layer does with each token by itself.
#pragma once

#include "graph/builder.h"
#include "model/arch.h"

namespace kvg {

// x (n_embd, n_tokens); returns the same shape
ggml_tensor * feed_forward(builder & b, const feed_forward_spec & spec, const role_tensors & w, ggml_tensor * x);

} // namespace kvg
