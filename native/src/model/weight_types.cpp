#include "model/weight_types.h"

#include "device.h"
#include "host_memory.h"

namespace kvg {

bool is_weight_type(ggml_type type) {
    if (type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16) {
        return true;
    }
    return ggml_is_quantized(type) && type != GGML_TYPE_Q8_1 && type != GGML_TYPE_Q8_K;
}

// A scratch context for tensors that only serve to ask a device a question.
static ggml_context_ptr probe_context() { return new_ggml_context(8 * ggml_tensor_overhead()); }

bool can_multiply(ggml_backend_dev_t dev, const gguf_tensor & source, ggml_backend_buffer_t buffer) {
    const ggml_context_ptr owner = probe_context();
    ggml_context * ctx = owner.get();
    ggml_tensor * w = ggml_new_tensor_3d(ctx, source.type, source.ne[0], source.ne[1], source.ne[2]);
    w->buffer = buffer;
    if (source.ne[2] == 1) {
        return can_run(dev, ggml_mul_mat(ctx, w, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, source.ne[0], 8)));
    }
    ggml_tensor * x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, source.ne[0], 1, 8);
    return can_run(dev, ggml_mul_mat_id(ctx, w, x, ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, 8)));
}

bool can_get_rows(ggml_backend_dev_t dev, ggml_type type, int64_t ne0, int64_t ne1) {
    const ggml_context_ptr ctx = probe_context();
    ggml_tensor * w = ggml_new_tensor_2d(ctx.get(), type, ne0, ne1);
    ggml_tensor * ids = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 8);
    return can_run(dev, ggml_get_rows(ctx.get(), w, ids));
}

} // namespace kvg
