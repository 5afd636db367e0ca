// Normalization of a layer's input, of each token by itself.
#pragma once

#include "graph/builder.h"
#include "model/hparams.h"

namespace kvg {

// x (n, ..)
ggml_tensor * normalized(builder & b, norm_kind kind, ggml_tensor * x, float eps);
// x (n, ..), weight and bias (n); without a weight x as it is, for norms that a layer hasn't
ggml_tensor * norm(builder & b, norm_kind kind, ggml_tensor * x, ggml_tensor * weight, float eps, ggml_tensor * bias = nullptr);

// Of a layer, or the last one: x is normalized without a weight where the model's norms have none.
ggml_tensor * norm_of_model(builder & b, const hparams & h, ggml_tensor * x, ggml_tensor * weight, ggml_tensor * bias);

} // namespace kvg
