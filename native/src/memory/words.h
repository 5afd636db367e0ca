// K and V as rows of F32 words, so that graphs move their bytes unchanged.
#pragma once

#include <cstdint>

#include <ggml.h>

#include "memory/kv_group.h"

namespace kvg {

// Whether rows are whole words: an odd number of blocks of Q8_0, Q5_0 or Q4_0 is not. Heads are even, so rows of F16 are.
bool has_words(const ggml_tensor * rows);
// The same rows as words: typed row operations alter NaNs, and would requantize. A tensor of its own at the same address, not a
// view, which would have to keep the type. Rows that are no whole words stay what they are, and can only be copied: that is exact
// from a quantized type to the same one. error(KVG_DEVICE)
ggml_tensor * as_words(ggml_context * ctx, ggml_tensor * rows);
// n rows from `begin` on.
ggml_tensor * rows_view(ggml_context * ctx, ggml_tensor * t, uint32_t begin, uint32_t n);
// How many rows of each tensor a graph gathers at most, at least 1: its scratch has all of them.
uint32_t max_gathered(const kv_group & group);

} // namespace kvg
