// Rows that are rounded for products (graph/product.h), as a graph node.
#pragma once

#include <ggml.h>

#include "cpu/products.h"

namespace kvg {

// Rows of x as bytes. Where x is an RMS norm of ours (graph/rms_norm.h), or a gate of our own products, and nothing outside of the graph
// reads it, the node makes it itself, each row before it is rounded: x is in no graph unless something else reads it. That is decided here:
// an output of the graph is marked before (builder::finish() checks it).
// x: (n, n_rows) of F32, whose rows are contiguous
ggml_tensor * rounded(ggml_context * ctx, ggml_tensor * x, const row_form & form);

} // namespace kvg
