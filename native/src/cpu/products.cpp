#include "cpu/products.h"

namespace kvg {

namespace products_vnni {
extern const product_kernel q8_0;
}

const product_kernel * product_kernel_for(ggml_type type) {
#ifdef __x86_64__
    static const bool here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("f16c");
    if (here && type == GGML_TYPE_Q8_0) {
        return &products_vnni::q8_0;
    }
#endif
    static_cast<void>(type);
    return nullptr;
}

} // namespace kvg
