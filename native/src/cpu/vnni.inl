// What products by AVX-512 VNNI share. Included where it is compiled for that, and nowhere else.
#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "cpu/tile_runs.inl"

namespace kvg::products_vnni {

namespace {

template <class T> inline T load(const uint8_t * from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

inline __m128i load_128(const uint8_t * from) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(from)); }
inline __m256i load_256(const uint8_t * from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }
inline __m512i joined(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
inline __m512i bytes(uint8_t value) { return _mm512_set1_epi8(static_cast<char>(value)); }

// Bytes of each lane, by their numbers in it; 0x80 gives 0.
inline __m512i picked(__m512i lanes, uint32_t four) {
    const __m512i first = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    return _mm512_shuffle_epi8(lanes, _mm512_add_epi8(first, _mm512_set1_epi32(static_cast<int32_t>(four))));
}
// Byte i of each lane, as an integer
inline __m512i byte_of(__m512i lanes, uint32_t i) { return picked(lanes, 0x80808000 | i); }

// A table of 16 signed bytes for _mm512_shuffle_epi8, raised by 128.
inline __m512i raised(__m128i table) { return _mm512_xor_si512(_mm512_broadcast_i32x4(table), bytes(0x80)); }

// What 4 bits stand for in IQ4_NL and IQ4_XS, raised by 128.
inline __m512i four_bit_table() {
    return raised(_mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113));
}

// An F16 in the lower or the upper half of each lane
inline __m512 low_halves(__m512i lanes) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(lanes)); }
inline __m512 high_halves(__m512i lanes) { return low_halves(_mm512_srli_epi32(lanes, 16)); }

// 16 x 16 of 32 bits
inline void transpose(__m512i * r) {
    __m512i t[16];
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// Of four vectors the sum of each 128 bits: those of vector i are lane i of 128 bits.
inline __m512i sums_of_fours(const __m512i * v) {
    const auto added = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
    const __m512i a = added(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const __m512i b = added(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    return added(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}
// Of two such vectors the sums of two neighbours
inline __m512i sums_of_halves(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

// The same place in each of 16 rows of weights.
struct weight_rows {
    static constexpr size_t STREAM = 9000; // two pages; measured on Zen 4
    static constexpr uint32_t STREAMED_ROWS = 7;

    const uint8_t * fours[4]; // rows 0, 4, 8 and 12: an instruction adds 0 to 3 strides itself
    size_t stride;
    size_t width; // bytes of a row
    size_t next;  // bytes to the rows of the next tile, or 0

    weight_rows(const uint8_t * first, size_t stride, size_t width, size_t next)
        : fours{first, first + 4 * stride, first + 8 * stride, first + 12 * stride}, stride(stride), width(width), next(next) {
        for (const uint8_t *& four : fours) {
            asm("" : "+r"(four)); // else there would be a pointer for each row, and too few registers
        }
    }
    weight_rows from(size_t offset) const { return {fours[0] + offset, stride, width, next}; }
    void advance(size_t bytes) {
        for (const uint8_t *& four : fours) {
            four += bytes;
        }
    }
    const uint8_t * at(size_t row) const { return fours[row / 4] + row % 4 * stride; }
    [[gnu::always_inline]] void fetch(size_t offset) const {
#pragma GCC unroll 16
        for (size_t i = 0; i < TILE; ++i) {
            _mm_prefetch(at(i) + offset, _MM_HINT_T1);
        }
    }
    // What is read later than this offset, of which rows have N bytes. Not for from().
    template <size_t N> [[gnu::always_inline]] void fetch_behind(size_t offset) const {
        for (size_t line = 0; line < N; line += 64) {
            fetch(fetched_at(offset + line, width, next));
        }
    }
    // Of each row an F16, a byte, 32 bits.
    [[gnu::always_inline]] __m512 halves(size_t offset) const {
        const auto sequence = std::make_integer_sequence<int, 8>();
        const __m256i first = _mm256_castsi128_si256(eight_halves(0, offset, sequence));
        return _mm512_cvtph_ps(_mm256_inserti128_si256(first, eight_halves(8, offset, sequence), 1));
    }
    [[gnu::always_inline]] __m512i bytes(size_t offset) const {
        return _mm512_cvtepu8_epi32(all_bytes(offset, std::make_integer_sequence<int, TILE>()));
    }
    [[gnu::always_inline]] __m512i word(size_t offset) const { return word(offset, std::make_index_sequence<TILE / 2>()); }
    // Of row i and each fourth row after it 128 bits
    [[gnu::always_inline]] __m512i fourths(size_t i, ptrdiff_t offset) const {
        const auto two = [&](size_t row) {
            const __m256i low = _mm256_castsi128_si256(load_128(at(row) + offset));
            return _mm256_inserti128_si256(low, load_128(at(row + 4) + offset), 1);
        };
        return joined(two(i), two(i + 8));
    }
    // Of each row 64 bits; 16 bits of them are then picked: word w of row r is number 4 r + w.
    [[gnu::always_inline]] void doubles(size_t offset, __m512i * both) const {
        for (size_t i = 0; i < 2; ++i) {
            const auto two = [&](size_t row) __attribute__((always_inline)) {
                // not by _mm_load_sd, which GCC takes for an aligned double
                const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(at(row) + offset));
                const __m128d low = _mm_castsi128_pd(first);
                return _mm_castpd_si128(_mm_loadh_pd(low, reinterpret_cast<const double *>(at(row + 1) + offset)));
            };
            const auto four = [&](size_t row) __attribute__((always_inline)) {
                return _mm256_inserti128_si256(_mm256_castsi128_si256(two(row)), two(row + 2), 1);
            };
            both[i] = joined(four(8 * i), four(8 * i + 4));
        }
    }
    // Of each row 128 bits: words i of all rows are vector i.
    [[gnu::always_inline]] void words(size_t offset, __m512i * words) const {
        const auto at = static_cast<ptrdiff_t>(offset);
        const __m512i v[4] = {fourths(0, at), fourths(1, at), fourths(2, at), fourths(3, at)};
        const __m512i t[4] = {_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]),
                              _mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3])};
        words[0] = _mm512_unpacklo_epi64(t[0], t[2]);
        words[1] = _mm512_unpackhi_epi64(t[0], t[2]);
        words[2] = _mm512_unpacklo_epi64(t[1], t[3]);
        words[3] = _mm512_unpackhi_epi64(t[1], t[3]);
    }

private:
    // Put in one after the other: for setr() GCC takes each second one through a mask.
    template <int... I>
    [[gnu::always_inline]] __m128i eight_halves(size_t row, size_t offset, std::integer_sequence<int, I...>) const {
        __m128i v = _mm_setzero_si128();
        ((v = _mm_insert_epi16(v, load<int16_t>(at(row + I) + offset), I)), ...);
        return v;
    }
    template <int... I> [[gnu::always_inline]] __m128i all_bytes(size_t offset, std::integer_sequence<int, I...>) const {
        __m128i v = _mm_setzero_si128();
        ((v = _mm_insert_epi8(v, load<int8_t>(at(I) + offset), I)), ...);
        return v;
    }
    template <size_t... I> [[gnu::always_inline]] __m512i word(size_t offset, std::index_sequence<I...>) const {
        return joined(_mm256_setr_epi32(load<int32_t>(at(I) + offset)...),
                      _mm256_setr_epi32(load<int32_t>(at(I + 8) + offset)...));
    }
};

// Calls f<N>() for N = n, if that is at most MOST.
template <uint32_t MOST, class F> inline bool few(uint32_t n, F f) {
    if constexpr (MOST > 0) {
        if (n == MOST) {
            f(std::integral_constant<uint32_t, MOST>());
            return true;
        }
        return few<MOST - 1>(n, f);
    }
    return false;
}

// Calls f<N>(r) for N rows from r on, as long as there are so many.
template <uint32_t N, class F> inline void by(uint32_t & r, uint32_t n_rows, F f) {
    for (; r + N <= n_rows; r += N) {
        f(std::integral_constant<uint32_t, N>(), r);
    }
}

// Eight rows at a time, as long as there are so many
template <class F> inline void by_eights(uint32_t n_rows, F f) {
    uint32_t r = 0;
    by<8>(r, n_rows, f);
    if (n_rows - r == 5) { // a token and four drafts: a row alone would wait for each of its products
        by<5>(r, n_rows, f);
    }
    by<4>(r, n_rows, f);
    by<3>(r, n_rows, f);
    by<2>(r, n_rows, f);
    by<1>(r, n_rows, f);
}

} // namespace

} // namespace kvg::products_vnni
