// Attention over a span of the cache: flash, or plain with folded query heads.
#pragma once

#include <ggml.h>

#include "model/hparams.h"

namespace kvg {

struct attention_params {
    bool flash;
    bool v_transposed;
    float scale;
};

// Rows of the mask: one for each token, and for a single token in plain attention one for each query head of a KV head, because the
// CPU's softmax shares out the second dimension among its threads.
uint32_t mask_rows(bool flash, uint32_t n_tokens, uint32_t n_head, uint32_t n_head_kv);

// q: (head_dim, n_head, n_tokens); k: (head_dim, n_head_kv, n_kv), v like k or transposed (n_kv, head_dim, n_head_kv): views of the
// cache; mask: F16 (n_kv, mask_rows()), 0 or -inf. Returns (n_head * head_dim, n_tokens).
ggml_tensor * attention(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask,
                        const attention_params & params);

// Whether the device runs flash attention for these heads and cache types itself.
bool can_flash_on(ggml_backend_dev_t device, const hparams & h, ggml_type type_k, ggml_type type_v);

} // namespace kvg
