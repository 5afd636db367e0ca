#include "cpu/kernel.h"

namespace kvg {

namespace attend_base {
extern const attend_kernel kernel;
}
namespace attend_avx2 {
extern const attend_kernel kernel;
}
namespace attend_avx512 {
extern const attend_kernel kernel;
}

const attend_kernel * const * attend_kernels_here() {
    static const attend_kernel * kernels[4] = {};
    static const bool found = [] {
        const attend_kernel ** next = kernels;
#ifdef __x86_64__
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        if (avx2 && __builtin_cpu_supports("avx512f")) {
            *next++ = &attend_avx512::kernel;
        }
        if (avx2) {
            *next++ = &attend_avx2::kernel;
        }
#endif
        *next = &attend_base::kernel;
        return true;
    }();
    static_cast<void>(found);
    return kernels;
}

const attend_kernel & attend_kernel_for(uint32_t head_dim_k, uint32_t head_dim_v) {
    const attend_kernel * const * all = attend_kernels_here();
    for (const attend_kernel * const * kernel = all; *kernel != &attend_base::kernel; ++kernel) {
        if (head_dim_k % (*kernel)->lanes == 0 && head_dim_v % (*kernel)->lanes == 0) {
            return **kernel;
        }
    }
    return *all[0];
}

const attend_kernel & recur_kernel_for(uint32_t width) {
    const attend_kernel * const * kernel = attend_kernels_here();
    while (width % (*kernel)->lanes != 0) {
        ++kernel; // the last has 4 lanes
    }
    return **kernel;
}

} // namespace kvg
