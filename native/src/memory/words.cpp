#include "memory/words.h"

#include <algorithm>

#include "error.h"

namespace kvg {

static constexpr uint64_t MAX_SCRATCH = 16ull << 20; // bytes

bool has_words(const ggml_tensor * rows) { return rows->nb[1] % sizeof(float) == 0; }

ggml_tensor * as_words(ggml_context * ctx, ggml_tensor * rows) {
    if (!has_words(rows)) {
        return rows;
    }
    ggml_tensor * words =
        ggml_new_tensor_2d(ctx, GGML_TYPE_F32, static_cast<int64_t>(rows->nb[1] / sizeof(float)), rows->ne[1]);
    if (ggml_backend_tensor_alloc(rows->buffer, words, rows->data) != GGML_STATUS_SUCCESS) {
        fail(KVG_DEVICE, "%s: can't alias '%s'", ggml_backend_buffer_name(rows->buffer), rows->name);
    }
    return words;
}

ggml_tensor * rows_view(ggml_context * ctx, ggml_tensor * t, uint32_t begin, uint32_t n) {
    return ggml_view_1d(ctx, t, t->ne[0] * n, t->nb[1] * begin);
}

uint32_t max_gathered(const kv_group & group) {
    const uint64_t widest = std::max<uint64_t>({1, group.k_row_bytes(), group.v_row_bytes()}); // 1: a group without layers
    return static_cast<uint32_t>(std::max<uint64_t>(1, MAX_SCRATCH / widest));
}

} // namespace kvg
