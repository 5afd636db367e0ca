#include "cpu/products.h"

#ifdef __aarch64__
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvg {

namespace products_vnni {
// Each by VNNI alone, and with AMX
extern const product_kernel q8_0[2], q4_0[2], q4_1[2], q5_0[2], q5_1[2], iq4_nl[2], mxfp4[2], nvfp4[2];
extern const product_kernel q2_k[2], q3_k[2], q4_k[2], q5_k[2], q6_k[2], iq4_xs[2], tq1_0[2], tq2_0[2];
extern const product_kernel iq2_xxs[2], iq2_xs[2], iq2_s[2], iq3_xxs[2], iq3_s[2], iq1_s[2], iq1_m[2];
} // namespace products_vnni
namespace products_float {
extern const product_set avx512, avx512_bf16;
}
namespace products_avx2 {
extern const product_set set;
}
namespace products_neon {
extern const product_set set;
}
namespace products_neon_i8mm {
extern const product_set set;
}

namespace {

#ifdef __x86_64__
// Linux saves AMX's registers only for a process that has asked for them. Sandboxes may refuse it.
bool may_use_amx() {
    constexpr int REQUEST = 0x1023; // ARCH_REQ_XCOMP_PERM, which older headers lack
    constexpr int TILES = 18;       // XFEATURE_XTILEDATA
    uint32_t a = 0, b = 0, c = 0, d = 0;
    const bool has_amx = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) && (d >> 25 & 1); // AMX-TILE, AMX-INT8
    return has_amx && syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
}

template <bool AMX> const product_kernel * vnni_kernel_for(ggml_type type) {
    switch (type) {
    case GGML_TYPE_Q8_0:
        return &products_vnni::q8_0[AMX];
    case GGML_TYPE_Q4_0:
        return &products_vnni::q4_0[AMX];
    case GGML_TYPE_Q4_1:
        return &products_vnni::q4_1[AMX];
    case GGML_TYPE_Q5_0:
        return &products_vnni::q5_0[AMX];
    case GGML_TYPE_Q5_1:
        return &products_vnni::q5_1[AMX];
    case GGML_TYPE_IQ4_NL:
        return &products_vnni::iq4_nl[AMX];
    case GGML_TYPE_MXFP4:
        return &products_vnni::mxfp4[AMX];
    case GGML_TYPE_NVFP4:
        return &products_vnni::nvfp4[AMX];
    case GGML_TYPE_Q2_K:
        return &products_vnni::q2_k[AMX];
    case GGML_TYPE_Q3_K:
        return &products_vnni::q3_k[AMX];
    case GGML_TYPE_Q4_K:
        return &products_vnni::q4_k[AMX];
    case GGML_TYPE_Q5_K:
        return &products_vnni::q5_k[AMX];
    case GGML_TYPE_Q6_K:
        return &products_vnni::q6_k[AMX];
    case GGML_TYPE_IQ4_XS:
        return &products_vnni::iq4_xs[AMX];
    case GGML_TYPE_TQ1_0:
        return &products_vnni::tq1_0[AMX];
    case GGML_TYPE_TQ2_0:
        return &products_vnni::tq2_0[AMX];
    case GGML_TYPE_IQ2_XXS:
        return &products_vnni::iq2_xxs[AMX];
    case GGML_TYPE_IQ2_XS:
        return &products_vnni::iq2_xs[AMX];
    case GGML_TYPE_IQ2_S:
        return &products_vnni::iq2_s[AMX];
    case GGML_TYPE_IQ3_XXS:
        return &products_vnni::iq3_xxs[AMX];
    case GGML_TYPE_IQ3_S:
        return &products_vnni::iq3_s[AMX];
    case GGML_TYPE_IQ1_S:
        return &products_vnni::iq1_s[AMX];
    case GGML_TYPE_IQ1_M:
        return &products_vnni::iq1_m[AMX];
    default:
        return nullptr;
    }
}

const product_set amx_int8 = {"amx-int8", vnni_kernel_for<true>};
const product_set avx512_vnni = {"avx512-vnni", vnni_kernel_for<false>};
#endif

} // namespace

const product_set * const * product_sets_here() {
    static const product_set * all[6] = {};
    static const bool found = [] {
        const product_set ** next = all;
#ifdef __x86_64__
        const bool avx512 = __builtin_cpu_supports("avx512f");
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        if (avx2 && avx512 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("bmi2")) {
            if (may_use_amx()) {
                *next++ = &amx_int8;
            }
            *next++ = &avx512_vnni;
        }
        if (avx512 && __builtin_cpu_supports("avx512bf16")) {
            *next++ = &products_float::avx512_bf16;
        }
        if (avx512) {
            *next++ = &products_float::avx512;
        }
        if (avx2) {
            *next++ = &products_avx2::set;
        }
#elif defined(__aarch64__)
        const bool dot = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
        if (dot && getauxval(AT_HWCAP2) & HWCAP2_I8MM) {
            *next++ = &products_neon_i8mm::set;
        }
        if (dot) {
            *next++ = &products_neon::set;
        }
#endif
        *next = nullptr;
        return true;
    }();
    static_cast<void>(found);
    return all;
}

const product_kernel * product_kernel_for(ggml_type type) {
    for (const product_set * const * set = product_sets_here(); *set; ++set) {
        if (const product_kernel * kernel = (*set)->kernel_for(type)) {
            return kernel;
        }
    }
    return nullptr;
}

} // namespace kvg
