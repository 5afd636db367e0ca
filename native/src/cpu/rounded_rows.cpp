// Rounding of rows on x86 with AVX-512.
#ifdef __x86_64__
#include "cpu/rounded_rows.h"

#include <immintrin.h>

#include <cmath>
#include <cstring>

namespace kvg::products_vnni {

namespace {

// Within -127 and 127, whatever x is.
inline __m512i rounded(const float * x, __m512 factor) {
    return _mm512_max_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), factor)), _mm512_set1_epi32(-127));
}

inline void store_bytes(uint8_t * to, __m512i numbers) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8(numbers));
}

void round_block(const float * x, uint8_t * numbers, rounded_32 & block) {
    const __m512 low = _mm512_loadu_ps(x);
    const __m512 high = _mm512_loadu_ps(x + 16);
    const bool any_nan = _mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q) != 0;
    const float most = any_nan ? NAN : _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    const __m512 factor = _mm512_set1_ps(most != 0 ? 127 / most : 0);
    const __m512i a = rounded(x, factor);
    const __m512i b = rounded(x + 16, factor);
    store_bytes(numbers, a);
    store_bytes(numbers + 16, b);
    const int32_t half = _mm512_reduce_add_epi32(a);
    const int32_t sum = half + _mm512_reduce_add_epi32(b);
    block.scale = _cvtsh_ss(_cvtss_sh(most / 127, 0)); // in F16 between, as ggml keeps it
    block.lift = -128 * sum;
    block.lift_of_half = -128 * half;
    block.total = block.scale * static_cast<float>(sum);
}

// The number that is farthest from 0, the first of them; NaN if any is.
float farthest(const float * x) {
    __m512 most = _mm512_setzero_ps();
    for (uint32_t i = 0; i < rounded_256::N; i += 16) {
        const __m512 v = _mm512_loadu_ps(x + i);
        if (_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0) {
            return NAN;
        }
        most = _mm512_max_ps(most, _mm512_abs_ps(v));
    }
    const __m512 size = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (uint32_t i = 0; i < rounded_256::N; i += 16) {
        const __mmask16 found = _mm512_cmp_ps_mask(_mm512_abs_ps(_mm512_loadu_ps(x + i)), size, _CMP_EQ_OQ);
        if (found != 0) {
            return x[i + static_cast<uint32_t>(__builtin_ctz(found))];
        }
    }
    return 0;
}

void round_block(const float * x, uint8_t * numbers, rounded_256 & block) {
    const float most = farthest(x);
    const float factor = most != 0 ? -127 / most : 0;
    block.scale = most != 0 ? 1 / factor : 0;
    for (uint32_t i = 0; i < 16; ++i) {
        const __m512i v = rounded(x + i * 16, _mm512_set1_ps(factor));
        store_bytes(numbers + i * 16, v);
        block.sums16[i] = static_cast<int16_t>(_mm512_reduce_add_epi32(v));
    }
    for (uint32_t i = 0; i < 8; ++i) {
        block.sums32[i] = static_cast<int16_t>(block.sums16[2 * i] + block.sums16[2 * i + 1]);
    }
}

template <class B> void round_part(const float * x, uint8_t * row, uint32_t n, uint32_t begin, uint32_t end) {
    uint8_t * blocks = row + n;
    for (uint32_t b = begin / B::N; b < end / B::N; ++b) {
        B block;
        round_block(x + (b * B::N - begin), row + b * B::N, block);
        std::memcpy(blocks + b * sizeof(block), &block, sizeof(block));
    }
}

} // namespace

const row_form by_32 = {row_bytes<rounded_32>, round_part<rounded_32>};
const row_form by_256 = {row_bytes<rounded_256>, round_part<rounded_256>};

} // namespace kvg::products_vnni
#endif
