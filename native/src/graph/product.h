// A product of weights with a run of rows as graph nodes.
#pragma once

#include <vector>

#include <ggml.h>

#include "cpu/products.h"

namespace kvg {

// How rows are rounded for these weights, or nullptr: ggml multiplies them. The CPU has a kernel for this type of weights, and they lie where
// it reads them, as the file has them.
// precondition: the weight has a buffer, if only one that says where it would be
const row_form * form_of(const ggml_tensor * weight, const ggml_tensor * x);
// weight * x for each of some weights, (n_out, n_rows) each, in one operation: threads wait for each other once. rows: rounded(x)
// (graph/rounding.h)
// precondition: fewer weights than ggml's operations have sources; all round x alike
std::vector<ggml_tensor *> multiply(ggml_context * ctx, const std::vector<ggml_tensor *> & weights, ggml_tensor * rows);
// product + x in one operation, as the product is called; nullptr: it isn't multiply()'s of one weight, or x isn't rows of the same shape
// one behind the other. The product itself is in no graph then, unless something else reads it, which computes it twice: an output of the
// graph is marked before.
ggml_tensor * multiply_and_add(ggml_context * ctx, ggml_tensor * product, ggml_tensor * x);
// Whether a node is of multiply() or multiply_and_add().
bool is_multiply(const ggml_tensor * node);
// Tells each product of a graph which one comes behind it, for threads that wait to read ahead. Behind the last comes the first, of the next
// token: a guess, as the next graph may be another one.
void set_order_of_products(ggml_cgraph * graph);

} // namespace kvg
