// Rotary embedding, in one place: decode and the K-shift must rotate alike, by ggml's operation or by a loop over the same angles.
#pragma once

#include <vector>

#include <ggml-backend.h>

#include "model/hparams.h"

namespace kvg {

// x (head_dim, n_heads, n) rotated by positions I32 (n); freq_factors F32 (n_rot / 2) or nullptr.
ggml_tensor * rope(ggml_context * ctx, ggml_tensor * x, ggml_tensor * positions, ggml_tensor * freq_factors,
                   const rope_params & params, bool in_place);

// Radians for one position, of each pair of dimensions. freq_factors: as above, on any device
std::vector<double> rope_angles(const ggml_tensor * freq_factors, const rope_params & params);

} // namespace kvg
