// RMS norms of rows on the CPU, as graph nodes that threads share.
#pragma once

#include <ggml.h>

namespace kvg {

// Whether the node may be made: the weight, one for each number of a row, is where the CPU reads it.
// precondition: the weight has a buffer, if only one that says where it would be, or is computed
bool is_normed_here(const ggml_tensor * x, const ggml_tensor * weight);
// Each row of x, as (n, n_rows) or (n, n_heads, n_tokens), divided by the root of the mean of its squares and eps, times the weight (n).
ggml_tensor * rms_norm(ggml_context * ctx, ggml_tensor * x, ggml_tensor * weight, float eps);
// Whether a node is of rms_norm(): its sources are x and the weight.
bool is_rms_norm(const ggml_tensor * node);
float eps_of(const ggml_tensor * node);

} // namespace kvg
