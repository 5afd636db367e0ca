// Products of rows with the matrices of experts as graph nodes, on the CPU.
//
// A token and one of its experts are a pair. Pairs are put in the order of their experts, so that the rows of an expert lie together and its
// weights are read once; experts without pairs are not read. Threads share the tiles of all experts. What a pair gives depends on no
// other pair, and on no number of threads.
#pragma once

#include <ggml.h>

#include "cpu/feed_forward.h"
#include "cpu/products.h"

namespace kvg {

struct expert_matrix {
    ggml_tensor * weight;          // (n_in, n_out, n_expert)
    ggml_tensor * scale = nullptr; // (n_expert): what products are multiplied by
    ggml_tensor * bias = nullptr;  // (n_out, n_expert): what is added then
};

// How rows are rounded for these weights, or nullptr: ggml multiplies them.
// precondition: the weight has a buffer, if only one that says where it would be
const row_form * form_of_experts(const ggml_tensor * weight, const ggml_tensor * x);
// The order of pairs, for the functions below. experts: I32 (n_used, n_tokens)
ggml_tensor * expert_order(ggml_context * ctx, ggml_tensor * experts, int64_t n_expert);
// Of each pair, in order, the row as bytes. x (n_in, 1 or n_used, n_tokens)
ggml_tensor * rounded_in_order(ggml_context * ctx, ggml_tensor * x, ggml_tensor * experts, ggml_tensor * order,
                               const row_form & form);
// (n_out, n_pairs), in order. rows: rounded
ggml_tensor * multiply_in_order(ggml_context * ctx, const expert_matrix & matrix, ggml_tensor * rows, ggml_tensor * order);
// What gates let through, (n_out, n_pairs), in order
ggml_tensor * gate_in_order(ggml_context * ctx, const expert_matrix & gates, const expert_matrix & ups, ggml_tensor * rows,
                            ggml_tensor * order, gate_function gate);
// Whether a node is one of the two above. Its first source is the rows.
bool is_expert_product(const ggml_tensor * node);
// The same numbers by tokens: (n, n_used, n_tokens). y (n, n_pairs)
ggml_tensor * by_tokens(ggml_context * ctx, ggml_tensor * y, ggml_tensor * experts, ggml_tensor * order);
// Of each token the sum of what its experts give, (n, n_tokens), each multiplied by its weight, F32 (1, n_used, n_tokens), if there are any
ggml_tensor * sum_by_tokens(ggml_context * ctx, ggml_tensor * y, ggml_tensor * experts, ggml_tensor * order,
                            ggml_tensor * weights);

} // namespace kvg
