// A product of weights with a run of rows as graph nodes.
#pragma once

#include <ggml.h>

namespace kvg {

// Whether the CPU has a kernel for weights of this type, and they lie where it reads them, as the file has them.
// precondition: the weight has a buffer, if only one that says where it would be
bool can_multiply(const ggml_tensor * weight, const ggml_tensor * x);
// Rows as bytes, for multiply().
ggml_tensor * rounded(ggml_context * ctx, ggml_tensor * x);
// weight * x; rows: rounded(x)
ggml_tensor * multiply(ggml_context * ctx, ggml_tensor * weight, ggml_tensor * rows, int64_t n_rows);

} // namespace kvg
