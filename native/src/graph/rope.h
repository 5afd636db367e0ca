// Rotary embedding, in one place: decode and the K-shift must rotate alike.
#pragma once

#include <ggml.h>

#include "model/hparams.h"

namespace kvg {

// x (head_dim, n_heads, n) rotated by positions I32 (n); freq_factors F32 (n_rot / 2) or nullptr.
ggml_tensor * rope(ggml_context * ctx, ggml_tensor * x, ggml_tensor * positions, ggml_tensor * freq_factors,
                   const rope_params & params, bool in_place);

} // namespace kvg
