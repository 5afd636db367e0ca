// x86 with AVX2, FMA and F16C.
#ifdef __x86_64__
#include <immintrin.h>
#define KVG_ISA cpu_avx2
#define KVG_ISA_NAME "avx2"
#define LANES 8
#include "cpu/kernel.inl"
#endif
