#include "attend/kernel.h"

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
        if (__builtin_cpu_supports("avx512f")) {
            *next++ = &attend_avx512::kernel;
        }
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
            *next++ = &attend_avx2::kernel;
        }
#endif
        *next = &attend_base::kernel;
        return true;
    }();
    static_cast<void>(found);
    return kernels;
}

} // namespace kvg
