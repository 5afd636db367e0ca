// Queries and K rotated by their positions, as graph nodes, on the CPU. All layers that rotate alike share the cosines and sines; ggml makes
// them anew in each layer, on one thread.
#pragma once

#include <ggml.h>

#include "model/layer_spec.h"

namespace kvg {

// Whether roped() rotates these: heads of F32, pairs of neighbours or of two halves.
bool is_roped_here(const ggml_tensor * heads, const rope_params & params);
// For each token a cosine for each pair, then the sines, with the gain: (n_rot, n_tokens). positions: I32 (n_tokens); freq_factors: as for
// rope(); params: lives as long as the graph
ggml_tensor * rope_table(ggml_context * ctx, ggml_tensor * positions, ggml_tensor * freq_factors, const rope_params & params);
// heads (head_dim, n_heads, n_tokens), rotated. table: rope_table() of the same params, which live as long as the graph
ggml_tensor * roped(ggml_context * ctx, ggml_tensor * heads, ggml_tensor * table, const rope_params & params);

} // namespace kvg
