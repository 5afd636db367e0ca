// Weights in BF16 on x86 with AVX512_BF16: rows are rounded to BF16, as ggml rounds them.
#ifdef __x86_64__
#include "cpu/products_float.inl"

namespace kvg::products_float {

namespace {

struct bf16_pairs {
    using weight = uint16_t;
    using number = uint16_t;
    static constexpr uint32_t STEP = 32;

    static __m512bh load(const uint16_t * from) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from)); }
    static __m512bh load(const uint16_t * from, uint32_t n) {
        uint16_t some[STEP] = {};
        std::memcpy(some, from, n * sizeof(uint16_t));
        return load(some);
    }
    static __m512bh row(const uint16_t * from) { return load(from); }
    static __m512bh row(const uint16_t * from, uint32_t n) { return load(from, n); }
    static __m512 add(__m512 sum, __m512bh w, __m512bh x) { return _mm512_dpbf16_ps(sum, w, x); }
};

size_t bytes(uint32_t n) { return n * sizeof(uint16_t); }

void round(const float * x, uint8_t * row, uint32_t, uint32_t begin, uint32_t end) {
    row += bytes(begin);
    const uint32_t n = end - begin;
    const auto sixteen = [&](uint32_t i, __m512 v, uint32_t count) {
        const auto rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
        std::memcpy(row + bytes(i), &rounded, bytes(count));
    };
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        sixteen(i, _mm512_loadu_ps(x + i), 16);
    }
    if (i < n) {
        sixteen(i, _mm512_maskz_loadu_ps(first(n - i), x + i), n - i);
    }
}

const row_form as_bf16 = {bytes, round};

const product_kernel by_pairs = {as_bf16, run<bf16_pairs>};

const product_kernel * kernel_for(ggml_type type) { return type == GGML_TYPE_BF16 ? &by_pairs : nullptr; }

} // namespace

extern const product_set avx512_bf16;
const product_set avx512_bf16 = {"avx512-bf16", kernel_for};

} // namespace kvg::products_float
#endif
