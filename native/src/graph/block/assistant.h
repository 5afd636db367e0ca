// What an assistant begins with, and what it hands on.
#pragma once

#include "graph/builder.h"
#include "model/weights.h"

namespace kvg {

// (n_embd, n_tokens), made of the target's embeddings of the tokens and its states before them, (n_embd_target, n_tokens).
ggml_tensor * assistant_begin(builder & b, const model & of, ggml_tensor * tokens, ggml_tensor * states);
// What it takes for the target's states behind the tokens, (n_embd_target, n_tokens). x (n_embd, n_tokens), behind its last norm
ggml_tensor * assistant_state(builder & b, const model & of, ggml_tensor * x);

} // namespace kvg
