// x86 with AVX-512F.
#ifdef __x86_64__
#include <immintrin.h>
#define KVG_ISA cpu_avx512
#define KVG_ISA_NAME "avx512"
#define LANES 16
#include "cpu/kernel.inl"
#endif
