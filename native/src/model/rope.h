// Rotary position embedding. Decode and the K-shift must rotate alike, so both take it from here: as a ggml operation, or as angles for
// the CPU's own loop.
#pragma once

#include <vector>

#include <ggml-backend.h>

#include "model/layer_spec.h"

namespace kvg {

// What rotated dimensions of queries and K are multiplied by when they get their positions (YaRN: Peng et al. 2023).
float first_gain(const rope_params & params);

// x (head_dim, n_heads, n) rotated by positions I32 (n); freq_factors F32 (n_rot / 2) or nullptr. gain: what rotated
// dimensions are multiplied by: first_gain() where positions are given to queries and K for the first time, 1 where K is rotated again
ggml_tensor * rope(ggml_context * ctx, ggml_tensor * x, ggml_tensor * positions, ggml_tensor * freq_factors,
                   const rope_params & params, bool in_place, float gain);

// For each of these positions the cosines of all pairs, then their sines, times first_gain(), as ggml computes them in rope().
// freq_factors: as above, here; out: params.n_rot floats a row
void rope_rows(const int32_t * positions, uint32_t n_rows, const float * freq_factors, const rope_params & params, float * out);

// Rotates each pair of dimensions by an angle of its own; the pairs are those that rope() rotates, and x is as above. ones: I32 (n), all
// 1; inverse_angles: F32 (n_rot / 2 or more), 1 / radians
ggml_tensor * rotate_pairs(ggml_context * ctx, ggml_tensor * x, ggml_tensor * ones, ggml_tensor * inverse_angles,
                           const rope_params & params);

// Radians for one position, of each pair of dimensions. freq_factors: as above, on any device
std::vector<double> rope_angles(const ggml_tensor * freq_factors, const rope_params & params);

} // namespace kvg
