#include "cpu/products.h"

namespace kvg {

namespace products_vnni {
extern const product_kernel q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, mxfp4;
extern const product_kernel q4_k;
extern const product_kernel q6_k;
} // namespace products_vnni

const product_kernel * product_kernel_for(ggml_type type) {
#ifdef __x86_64__
    static const bool here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("f16c");
    if (!here) {
        return nullptr;
    }
    switch (type) {
    case GGML_TYPE_Q8_0:
        return &products_vnni::q8_0;
    case GGML_TYPE_Q4_0:
        return &products_vnni::q4_0;
    case GGML_TYPE_Q4_1:
        return &products_vnni::q4_1;
    case GGML_TYPE_Q5_0:
        return &products_vnni::q5_0;
    case GGML_TYPE_Q5_1:
        return &products_vnni::q5_1;
    case GGML_TYPE_IQ4_NL:
        return &products_vnni::iq4_nl;
    case GGML_TYPE_MXFP4:
        return &products_vnni::mxfp4;
    case GGML_TYPE_Q4_K:
        return &products_vnni::q4_k;
    case GGML_TYPE_Q6_K:
        return &products_vnni::q6_k;
    default:
        return nullptr;
    }
#else
    static_cast<void>(type);
    return nullptr;
#endif
}

} // namespace kvg
