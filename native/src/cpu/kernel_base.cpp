// Whatever the compiler was told to build for: SSE2 or NEON.
#define KVG_ISA cpu_base
#define KVG_ISA_NAME "base"
#define LANES 4
#include "cpu/kernel.inl"
