#include "cpu/products.h"

namespace kvg {

namespace products_vnni {
extern const product_kernel q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, mxfp4;
extern const product_kernel q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs, tq1_0, tq2_0;
extern const product_kernel iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s, iq1_s, iq1_m;
} // namespace products_vnni

const product_kernel * product_kernel_for(ggml_type type) {
#ifdef __x86_64__
    static const bool here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
                             __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
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
    case GGML_TYPE_Q2_K:
        return &products_vnni::q2_k;
    case GGML_TYPE_Q3_K:
        return &products_vnni::q3_k;
    case GGML_TYPE_Q4_K:
        return &products_vnni::q4_k;
    case GGML_TYPE_Q5_K:
        return &products_vnni::q5_k;
    case GGML_TYPE_Q6_K:
        return &products_vnni::q6_k;
    case GGML_TYPE_IQ4_XS:
        return &products_vnni::iq4_xs;
    case GGML_TYPE_TQ1_0:
        return &products_vnni::tq1_0;
    case GGML_TYPE_TQ2_0:
        return &products_vnni::tq2_0;
    case GGML_TYPE_IQ2_XXS:
        return &products_vnni::iq2_xxs;
    case GGML_TYPE_IQ2_XS:
        return &products_vnni::iq2_xs;
    case GGML_TYPE_IQ2_S:
        return &products_vnni::iq2_s;
    case GGML_TYPE_IQ3_XXS:
        return &products_vnni::iq3_xxs;
    case GGML_TYPE_IQ3_S:
        return &products_vnni::iq3_s;
    case GGML_TYPE_IQ1_S:
        return &products_vnni::iq1_s;
    case GGML_TYPE_IQ1_M:
        return &products_vnni::iq1_m;
    default:
        return nullptr;
    }
#else
    static_cast<void>(type);
    return nullptr;
#endif
}

} // namespace kvg
