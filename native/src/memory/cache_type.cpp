#include "memory/cache_type.h"

#include "error.h"
#include "kvgraph.h"

namespace kvg {

static_assert(int{KVG_TYPE_F32} == GGML_TYPE_F32 && int{KVG_TYPE_F16} == GGML_TYPE_F16 && int{KVG_TYPE_BF16} == GGML_TYPE_BF16);
static_assert(int{KVG_TYPE_Q8_0} == GGML_TYPE_Q8_0 && int{KVG_TYPE_Q5_1} == GGML_TYPE_Q5_1 &&
              int{KVG_TYPE_Q5_0} == GGML_TYPE_Q5_0 && int{KVG_TYPE_Q4_1} == GGML_TYPE_Q4_1 &&
              int{KVG_TYPE_Q4_0} == GGML_TYPE_Q4_0);

ggml_type cache_type(const char * name, int32_t type) {
    switch (type) {
    case KVG_TYPE_F32:
    case KVG_TYPE_F16:
    case KVG_TYPE_BF16:
    case KVG_TYPE_Q8_0:
    case KVG_TYPE_Q5_1:
    case KVG_TYPE_Q5_0:
    case KVG_TYPE_Q4_1:
    case KVG_TYPE_Q4_0:
        break;
    default:
        fail(KVG_INVALID_ARGUMENT, "%s is %d, and no cache type has that number", name, type);
    }
    return static_cast<ggml_type>(type);
}

void require_blocks_fit(const char * name, ggml_type type, uint32_t head_dim) {
    const auto block = static_cast<uint32_t>(ggml_blck_size(type));
    if (head_dim % block != 0) {
        fail(KVG_UNSUPPORTED,
             "%s=\"%s\" keeps blocks of %u values, and this model's heads of %u are no multiple of that; use \"f16\"", name,
             ggml_type_name(type), block, head_dim);
    }
}

} // namespace kvg
