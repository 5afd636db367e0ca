// Products on x86 with AVX2, FMA and F16C.
#ifdef __x86_64__
#define KVG_PRODUCTS products_avx2
#define KVG_PRODUCTS_NAME "avx2"
#include "cpu/lanes_avx2.inl"
#include "cpu/products.inl"
#endif
