// What each layer has of its own for each token of the vocabulary, beside the embedding that all layers begin with.
#pragma once

#include "graph/builder.h"
#include "model/weights.h"

namespace kvg {

// Of all layers: (n_embd_layer, n_tokens, n_layer). tokens I32 (n_tokens), x (n_embd, n_tokens): their embeddings
ggml_tensor * layer_embeddings(builder & b, const model & of, ggml_tensor * tokens, ggml_tensor * x);
// One layer's: (n_embd_layer, n_tokens)
ggml_tensor * embedding_of_layer(builder & b, ggml_tensor * all, uint32_t layer);
// What is added to x (n_embd, n_tokens): made of it and of the layer's own embedding.
ggml_tensor * made_of_layer_embedding(builder & b, const model & of, uint32_t layer, ggml_tensor * x, ggml_tensor * own);

} // namespace kvg
