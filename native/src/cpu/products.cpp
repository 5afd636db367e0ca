#include "cpu/products.h"

#include "cpu/vnni_kernels.h"

#ifdef __aarch64__
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvg {

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
// Linux saves AMX's registers only for a process that has asked for them. A sandbox may refuse that, or ignore it.
bool is_given_amx() {
    constexpr int ASK = 0x1023;  // ARCH_REQ_XCOMP_PERM, which older headers lack
    constexpr int TELL = 0x1022; // ARCH_GET_XCOMP_PERM
    constexpr int TILES = 18;    // XFEATURE_XTILEDATA
    uint32_t a = 0, b = 0, c = 0, d = 0;
    const bool has_amx = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) && (d >> 25 & 1); // AMX-TILE, AMX-INT8
    uint64_t given = 0;
    return has_amx && syscall(SYS_arch_prctl, ASK, TILES) == 0 && syscall(SYS_arch_prctl, TELL, &given) == 0 &&
           (given >> TILES & 1);
}

const products_vnni::type_kernels * vnni_kernels_for(ggml_type type) {
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
    case GGML_TYPE_NVFP4:
        return &products_vnni::nvfp4;
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
}

template <const product_kernel * products_vnni::type_kernels::* SET> const product_kernel * vnni_kernel_for(ggml_type type) {
    const products_vnni::type_kernels * kernels = vnni_kernels_for(type);
    return kernels ? kernels->*SET : nullptr;
}

const product_set amx_int8 = {"amx-int8", vnni_kernel_for<&products_vnni::type_kernels::amx>};
const product_set avx512_vnni = {"avx512-vnni", vnni_kernel_for<&products_vnni::type_kernels::vnni>};
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
            if (is_given_amx()) {
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
