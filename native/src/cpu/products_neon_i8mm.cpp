// Products on 64-bit ARM with the product of two rows of bytes by two, beside the dot product.
#ifdef __aarch64__
#define KVG_PRODUCTS products_neon_i8mm
#define KVG_PRODUCTS_NAME "neon-i8mm"
#include "cpu/lanes_neon.inl"
#include "cpu/products.inl"
#endif
