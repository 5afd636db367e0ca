// Stochastic rounding (Croci et al. 2022): noise as wide as the step of a type, added before values are rounded to it.
//
// K that is rotated a little, rounded, rotated a little again drifts: what turns by less than half a step is rounded back each time,
// and all these errors point one way. The same happens where rows come back to where they were, by a whole turn in several steps or
// to and fro. With noise a rounding goes up or down by chance, in the mean it is right, and n of them come to the square root of n.
#pragma once

#include <ggml.h>

namespace kvg {

// Adds it in place. values: F32 (width, n), about to be rounded to `type`; seeds: I32 (n), negative: no noise for this
// row. The same seed gives the same noise. preconditions: run by the CPU's backend; F16, BF16 or a quantized cache type
ggml_tensor * dither(ggml_context * ctx, ggml_tensor * values, ggml_tensor * seeds, ggml_type type);

} // namespace kvg
