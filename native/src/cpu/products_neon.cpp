// Products on 64-bit ARM with the dot product of bytes.
#ifdef __aarch64__
#define KVG_PRODUCTS products_neon
#define KVG_PRODUCTS_NAME "neon-dotprod"
#include "cpu/lanes_neon.inl"
#include "cpu/products.inl"
#endif
