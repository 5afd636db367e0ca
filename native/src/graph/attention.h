// Attention over a span of the cache.
#pragma once

#include <ggml.h>

#include "graph/attend.h"
#include "memory/kv_group.h"
#include "model/layer_spec.h"

namespace kvg {

// Which operations it is made of.
enum class attention_kind {
    none,   // the layer doesn't attend
    flash,  // ggml's flash attention
    plain,  // two matrix products and a softmax, query heads folded
    attend, // this library's own on the CPU
};

// A layer's attention: of which kind, and for attention_kind::attend the operation.
struct layer_attention {
    attention_kind kind;
    attend_op * op; // nullptr for other kinds
    float scale;
    float soft_cap; // 0: none
    float max_bias; // of ALiBi; 0: none
};

// q: (head_dim_k, n_head, n_tokens); k, v: (their head_dim, n_head_kv, n_kv), views of the cache; mask: F16 (n_kv, n_tokens), 0 or
// -inf, with ggml's ALiBi how far away the token is, negative, or -inf; sinks: F32 (n_head), a score for each head that takes its share of
// the weights and has no V, or nullptr.
// Returns (n_head * head_dim_v, n_tokens).
ggml_tensor * attention(ggml_context * ctx, const layer_attention & how, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
                        ggml_tensor * mask, ggml_tensor * sinks);

// Whether the device runs that attention for such a layer and cache types itself.
bool can_plain_on(ggml_backend_dev_t device, const layer_spec & layer, const cache_types & types);
bool can_flash_on(ggml_backend_dev_t device, const layer_spec & layer, const cache_types & types);

} // namespace kvg
