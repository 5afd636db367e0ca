// Weights in F16 and BF16 on x86 with AVX-512: rows stay F32.
#ifdef __x86_64__
#include "cpu/products_float.inl"

namespace kvg::products_float {

namespace {

struct with_f32 {
    using number = float;
    static constexpr uint32_t STEP = 16;

    static __m512 row(const float * from) { return _mm512_loadu_ps(from); }
    static __m512 row(const float * from, uint32_t n) { return _mm512_maskz_loadu_ps(first(n), from); }
    static __m512 add(__m512 sum, __m512 w, __m512 x) { return _mm512_fmadd_ps(w, x, sum); }
};

// 16 of 16 bits, or fewer and zeros
inline __m256i load_16(const uint16_t * from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }
inline __m256i load_16(const uint16_t * from, uint32_t n) {
    uint16_t some[16] = {};
    std::memcpy(some, from, n * sizeof(uint16_t));
    return load_16(some);
}

struct f16_weights : with_f32 {
    using weight = uint16_t;

    template <class... N> static __m512 load(const uint16_t * from, N... n) { return _mm512_cvtph_ps(load_16(from, n...)); }
};

struct bf16_weights : with_f32 {
    using weight = uint16_t;

    template <class... N> static __m512 load(const uint16_t * from, N... n) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16(from, n...)), 16));
    }
};

size_t bytes(uint32_t n) { return n * sizeof(float); }
void copy(const float * x, uint8_t * row, uint32_t, uint32_t begin, uint32_t end) {
    std::memcpy(row + bytes(begin), x, bytes(end - begin));
}

const row_form as_they_are = {bytes, copy};

const product_kernel f16 = {as_they_are, run<f16_weights>};
const product_kernel bf16 = {as_they_are, run<bf16_weights>};

const product_kernel * kernel_for(ggml_type type) {
    switch (type) {
    case GGML_TYPE_F16:
        return &f16;
    case GGML_TYPE_BF16:
        return &bf16;
    default:
        return nullptr;
    }
}

} // namespace

extern const product_set avx512;
const product_set avx512 = {"avx512", kernel_for};

} // namespace kvg::products_float
#endif
