// What a router gives each expert, which experts a token goes to, and with which weights, as graph nodes, on the CPU. What a token gets
// depends on no other token, and on no number of threads.
#pragma once

#include <ggml.h>

#include "model/layer_spec.h"

namespace kvg {

// Whether expert_scores() multiplies with this matrix: in F32, where the CPU reads it.
// precondition: the weight has a buffer, if only one that says where it would be
bool is_router_here(const ggml_tensor * weight, const ggml_tensor * x);
// weight * x + bias, (n_expert, n_tokens). bias: (n_expert), or nullptr
ggml_tensor * expert_scores(ggml_context * ctx, ggml_tensor * weight, ggml_tensor * bias, ggml_tensor * x);
// Whether a node is of expert_scores().
bool is_expert_scores(const ggml_tensor * node);
// Of each token the n_used experts with the highest scores, the best first: I32 (n_used, n_tokens). scores (n_expert, n_tokens)
ggml_tensor * best_experts(ggml_context * ctx, ggml_tensor * scores, uint32_t n_used);
// What each chosen expert's result is multiplied by, (n_used, n_tokens): a softmax over the scores of all, or of the chosen.
// spec: lives as long as the graph
// precondition: spec.gating is softmax or softmax_of_chosen
ggml_tensor * weights_of_experts(ggml_context * ctx, ggml_tensor * scores, ggml_tensor * experts,
                                 const feed_forward_spec & spec);

} // namespace kvg
