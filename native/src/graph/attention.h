// Attention over a span of the cache.
#pragma once

#include <ggml.h>

#include "graph/attend.h"
#include "model/hparams.h"

namespace kvg {

// Which operations it is made of.
enum class attention_kind {
    flash,  // ggml's flash attention
    plain,  // two matrix products and a softmax, query heads folded
    attend, // this library's own on the CPU
};

// q: (head_dim, n_head, n_tokens); k, v: (head_dim, n_head_kv, n_kv), views of the cache; mask: F16 (n_kv, n_tokens), 0 or -inf.
// Returns (n_head * head_dim, n_tokens). workspace: for `attend`, else may be nullptr
ggml_tensor * attention(ggml_context * ctx, attention_kind kind, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
                        ggml_tensor * mask, float scale, attend_workspace * workspace);

// Whether the device runs that attention for these heads and cache types itself.
bool can_plain_on(ggml_backend_dev_t device, const hparams & h, ggml_type type_k, ggml_type type_v);
bool can_flash_on(ggml_backend_dev_t device, const hparams & h, ggml_type type_k, ggml_type type_v);

} // namespace kvg
