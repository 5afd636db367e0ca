// Gates of feed-forwards that the CPU has a kernel for.
#pragma once

#include <ggml.h>

#include "cpu/feed_forward.h"

namespace kvg {

// nullptr: there is none of this kind. GGML_GLU_OP_SWIGLU_OAI: with gpt-oss's numbers
gate_function gate_of(ggml_glu_op kind);

} // namespace kvg
