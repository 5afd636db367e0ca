#include "cpu/kernel.h"

namespace kvg {

namespace cpu_base {
extern const cpu_kernels kernels;
}
namespace cpu_avx2 {
extern const cpu_kernels kernels;
}
namespace cpu_avx512 {
extern const cpu_kernels kernels;
}

const cpu_kernels * const * kernels_here() {
    static const cpu_kernels * all[4] = {};
    static const bool found = [] {
        const cpu_kernels ** next = all;
#ifdef __x86_64__
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        if (avx2 && __builtin_cpu_supports("avx512f")) {
            *next++ = &cpu_avx512::kernels;
        }
        if (avx2) {
            *next++ = &cpu_avx2::kernels;
        }
#endif
        *next = &cpu_base::kernels;
        return true;
    }();
    static_cast<void>(found);
    return all;
}

const cpu_kernels & kernels_for_heads(uint32_t head_dim_k, uint32_t head_dim_v) {
    const cpu_kernels * const * all = kernels_here();
    for (const cpu_kernels * const * kernel = all; *kernel != &cpu_base::kernels; ++kernel) {
        if (head_dim_k % (*kernel)->lanes == 0 && head_dim_v % (*kernel)->lanes == 0) {
            return **kernel;
        }
    }
    return *all[0];
}

const cpu_kernels & kernels_for_width(uint32_t width) {
    const cpu_kernels * const * kernel = kernels_here();
    while (width % (*kernel)->lanes != 0) {
        ++kernel; // the last has 4 lanes
    }
    return **kernel;
}

} // namespace kvg
