// AltUp and Laurel (Gemma 3n): each token has several hidden states, of which one goes through the layer, and the others are guessed from
// all of them and then corrected.
#pragma once

#include "graph/builder.h"
#include "model/weights.h"

namespace kvg {

// The states that the first layer begins with, (n_embd, n_altup, n_tokens), made of the embeddings. x (n_embd, n_tokens)
ggml_tensor * altup_states(builder & b, const model & of, ggml_tensor * x);
// A guess of what the layer makes of them.
ggml_tensor * altup_guess(builder & b, const model & of, uint32_t layer, ggml_tensor * states);
// The one that goes through the layer: (n_embd, n_tokens)
ggml_tensor * altup_active(builder & b, ggml_tensor * states);
// The guess, corrected by what the layer has made of the active one. y (n_embd, n_tokens)
ggml_tensor * altup_corrected(builder & b, const model & of, uint32_t layer, ggml_tensor * guess, ggml_tensor * y);
// With what the layer makes of its own embedding of the token added to all states but the active one.
ggml_tensor * altup_with_own(builder & b, const model & of, uint32_t layer, ggml_tensor * states, ggml_tensor * own);
// One state for each token: (n_embd, n_tokens)
ggml_tensor * altup_merged(builder & b, const model & of, ggml_tensor * states);

// x by way of a smaller width, added to it. x (n_embd, n_tokens)
ggml_tensor * laurel(builder & b, const model & of, uint32_t layer, ggml_tensor * x);

} // namespace kvg
