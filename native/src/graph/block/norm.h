// Normalization of a layer's input, of each token by itself.
#pragma once

#include "graph/builder.h"
#include "model/layer_spec.h"

namespace kvg {

// x (n, n_tokens), weight (n)
ggml_tensor * norm(builder & b, norm_kind kind, ggml_tensor * x, ggml_tensor * weight, float eps);

} // namespace kvg
