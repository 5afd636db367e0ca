// Kernels of x86 with AVX-512 VNNI, by type of weights.
#pragma once

#include "cpu/products.h"

namespace kvg::products_vnni {

struct type_kernels {
    const product_kernel * vnni;
    const product_kernel * amx; // for a CPU that has AMX, too; nullptr: there is none
};

extern const type_kernels q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, mxfp4, nvfp4;
extern const type_kernels q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs, tq1_0, tq2_0;
extern const type_kernels iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s, iq1_s, iq1_m;

} // namespace kvg::products_vnni
