// Attention over a span of the cache: flash, or plain with folded query heads.
#pragma once

#include <ggml.h>

#include "cache/kv_cache.h"

namespace kvg {

struct attention_params {
    bool flash;
    float scale;
};

// q: (head_dim, n_head, n_tokens); k, v: (head_dim, n_head_kv, n_kv) views of the cache; mask: F16 (n_kv, n_tokens), 0 or -inf.
// Returns (n_head * head_dim, n_tokens).
ggml_tensor * attention(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask,
                        const attention_params & params);

// Whether the device runs flash attention for this cache and head count itself.
bool can_flash_on(ggml_backend_dev_t device, const kv_cache & cache, uint32_t n_head);

} // namespace kvg
