// The kernels of an instruction set. Included behind its vectors.
#include "cpu/rounding.inl"
#include "cpu/tiles.inl"

#include "cpu/tiles_256.inl"
#include "cpu/tiles_32.inl"

#include "cpu/types_32.inl"

#include "cpu/types_256.inl"
#include "cpu/types_i.inl"
#if LANES == 8
#include "cpu/row_sums_avx2.inl"
#endif

namespace kvg::KVG_PRODUCTS {

namespace {

template <class W> const product_kernel kernel_32 = {by_32, in_32::run<W>};
template <class W> const product_kernel kernel_256 = {by_256, in_256::run<W>};

const product_kernel * kernel_for(ggml_type type) {
    switch (type) {
    case GGML_TYPE_Q8_0:
        return &kernel_32<q8_0_weights>;
    case GGML_TYPE_Q4_0:
        return &kernel_32<q4_0_weights>;
    case GGML_TYPE_Q4_1:
        return &kernel_32<q4_1_weights>;
    case GGML_TYPE_Q5_0:
        return &kernel_32<q5_0_weights>;
    case GGML_TYPE_Q5_1:
        return &kernel_32<q5_1_weights>;
    case GGML_TYPE_IQ4_NL:
        return &kernel_32<iq4_nl_weights>;
    case GGML_TYPE_MXFP4:
        return &kernel_32<mxfp4_weights>;
    case GGML_TYPE_NVFP4:
        return &kernel_32<nvfp4_weights>;
    case GGML_TYPE_Q2_K:
        return &kernel_256<q2_k_weights>;
    case GGML_TYPE_Q3_K:
        return &kernel_256<q3_k_weights>;
    case GGML_TYPE_Q4_K:
        return &kernel_256<q4_k_weights>;
    case GGML_TYPE_Q5_K:
        return &kernel_256<q5_k_weights>;
    case GGML_TYPE_Q6_K:
        return &kernel_256<q6_k_weights>;
    case GGML_TYPE_IQ4_XS:
        return &kernel_256<iq4_xs_weights>;
    case GGML_TYPE_TQ1_0:
        return &kernel_256<tq1_0_weights>;
    case GGML_TYPE_TQ2_0:
        return &kernel_256<tq2_0_weights>;
    case GGML_TYPE_IQ2_XXS:
        return &kernel_256<iq2_xxs_weights>;
    case GGML_TYPE_IQ2_XS:
        return &kernel_256<iq2_xs_weights>;
    case GGML_TYPE_IQ2_S:
        return &kernel_256<iq2_s_weights>;
    case GGML_TYPE_IQ3_XXS:
        return &kernel_256<iq3_xxs_weights>;
    case GGML_TYPE_IQ3_S:
        return &kernel_256<iq3_s_weights>;
    case GGML_TYPE_IQ1_S:
        return &kernel_256<iq1_s_weights>;
    case GGML_TYPE_IQ1_M:
        return &kernel_256<iq1_m_weights>;
    default:
        return nullptr;
    }
}

} // namespace

extern const product_set set;
const product_set set = {KVG_PRODUCTS_NAME, kernel_for};

} // namespace kvg::KVG_PRODUCTS
