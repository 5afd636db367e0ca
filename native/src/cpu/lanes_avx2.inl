// Vectors of AVX2 for products. Its one instruction for products of bytes adds two of them in 16 bits, so sums of bytes begin in 16 bits, as
// many as fit.
#include <immintrin.h>

#include <type_traits>

#define LANES 8
#include "cpu/lanes.inl"

namespace kvg::KVG_PRODUCTS {

namespace {

inline __m256i raw(words v) { return reinterpret_cast<__m256i>(v); }
inline __m256i raw(ints v) { return reinterpret_cast<__m256i>(v); }
inline words as_words(__m256i v) { return reinterpret_cast<words>(v); }
inline ints as_ints(__m256i v) { return reinterpret_cast<ints>(v); }

inline floats fused(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
// half(i): the one of lane i. They are loaded into lanes: GCC would take them through general registers, and only one a cycle gets from there
// into vectors.
template <class F> inline floats of_halves(F half) {
    __m128i all = _mm_insert_epi16(__m128i{}, half(0), 0);
    all = _mm_insert_epi16(all, half(1), 1);
    all = _mm_insert_epi16(all, half(2), 2);
    all = _mm_insert_epi16(all, half(3), 3);
    all = _mm_insert_epi16(all, half(4), 4);
    all = _mm_insert_epi16(all, half(5), 5);
    all = _mm_insert_epi16(all, half(6), 6);
    return _mm256_cvtph_ps(_mm_insert_epi16(all, half(7), 7));
}
inline floats low_halves(words lanes) {
    const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(raw(lanes), _mm256_set1_epi32(0xffff)), __m256i{});
    return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
// The lower and the upper halves of all lanes
inline void both_halves(words lanes, floats & low, floats & high) {
    const __m256i sorted = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(raw(lanes), sorted), 0xd8);
    low = _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
    high = _mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1));
}
inline float through_half(float x) { return _cvtsh_ss(_cvtss_sh(x, 0)); }
inline ints rounded(floats x) { return as_ints(_mm256_cvtps_epi32(x)); }

// Whether any lane is true.
inline bool any(ints lanes) { return _mm256_movemask_ps(_mm256_castsi256_ps(raw(lanes))) != 0; }
inline int32_t sum_of(ints v) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(raw(v)), _mm256_extracti128_si256(raw(v), 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}
// None may be NaN.
inline float greatest_of(floats v) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
// Integers that are bytes, one behind the other
inline void store_bytes(uint8_t * to, ints v) {
    const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(raw(v)), _mm256_extracti128_si256(raw(v), 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(to), _mm_packs_epi16(shorts, shorts));
}

// Of each row 16 bytes: word i of all rows is vector i.
inline void turn(const sixteen * rows, words * four) {
    __m256i v[4];
    for (int i = 0; i < 4; ++i) {
        const __m256i low = _mm256_castsi128_si256(reinterpret_cast<__m128i>(rows[i]));
        v[i] = _mm256_inserti128_si256(low, reinterpret_cast<__m128i>(rows[i + 4]), 1);
    }
    const __m256i low[2] = {_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpacklo_epi32(v[2], v[3])};
    const __m256i high[2] = {_mm256_unpackhi_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[2], v[3])};
    four[0] = as_words(_mm256_unpacklo_epi64(low[0], low[1]));
    four[1] = as_words(_mm256_unpackhi_epi64(low[0], low[1]));
    four[2] = as_words(_mm256_unpacklo_epi64(high[0], high[1]));
    four[3] = as_words(_mm256_unpackhi_epi64(high[0], high[1]));
}

// The bytes of a table at indices from 0 to 15
inline words looked_up(const int8_t * table, words indices) {
    return as_words(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), raw(indices)));
}

// Bytes of each lane, by their numbers in it; 0x80 gives 0.
inline words picked(words lanes, uint32_t four) {
    const __m256i first = _mm256_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0, 0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    return as_words(_mm256_shuffle_epi8(raw(lanes), _mm256_add_epi8(first, raw(all(four)))));
}
// Byte i of each lane, four times
inline words repeated(words lanes, uint32_t i) { return picked(lanes, 0x01010101 * i); }

typedef int16_t shorts __attribute__((vector_size(LANES * 4)));

inline shorts pair_products(words unsigned_bytes, words bytes) {
    return reinterpret_cast<shorts>(_mm256_maddubs_epi16(raw(unsigned_bytes), raw(bytes)));
}
inline shorts added(shorts a, shorts b) {
    a += b;
    asm("" : "+x"(a)); // GCC would first multiply all, run out of registers, and add then
    return a;
}

typedef words factors; // integers that sums are multiplied by, twice in each lane

// Byte i of each lane, which has a sign
inline factors factors_of(words lanes, uint32_t i) {
    return as_words(_mm256_srai_epi16(raw(picked(lanes, 0x00800080 | i << 8 | i << 24)), 8));
}
inline ints times(shorts sums, factors by) { return as_ints(_mm256_madd_epi16(reinterpret_cast<__m256i>(sums), raw(by))); }

typedef words pairs; // two integers in each lane

// Bytes 2i and 2i + 1 of each lane, which have signs, times 2 to the power of `bits`
inline pairs pairs_of(words lanes, uint32_t i, uint32_t bits) {
    const words two = picked(lanes, 0x01800080 + 0x02000200 * i);
    return as_words(_mm256_sra_epi16(raw(two), _mm_cvtsi32_si128(static_cast<int>(8 - bits))));
}
// Each first, and each second integer is multiplied by one of two numbers.
inline ints times(pairs integers, const int16_t * two) {
    return as_ints(_mm256_madd_epi16(raw(integers), raw(all(load<uint32_t>(two)))));
}

// How bytes of weights are multiplied by a row's.

// Bytes without signs
struct plain_form {
    static constexpr bool TWO_ROWS = false;
    static constexpr uint32_t MOST_ROWS = 4;   // at a time: of registers there are 16
    static constexpr uint32_t MOST_GROUPS = 2; // of LANES rows of weights
    static constexpr bool RAISED = false;      // by 128
    typedef words stored;
    typedef shorts sum;

    // Vectors of bytes, up to `most`, whose products fit into a sum. A power of two
    static constexpr uint32_t vectors(uint32_t most) {
        uint32_t n = 1;
        while (2 * n * 2 * most * 127 <= 32767) {
            n *= 2;
        }
        return n;
    }
    static stored store(words bytes) { return bytes; }
    // x: four numbers of a row, in each lane
    static void add_products(sum & to, const stored & weights, words x) { to = added(to, pair_products(weights, x)); }
    static ints scaled(const sum & of, factors by) { return times(of, by); }
};

// Bytes with signs, whose sums are integers at once
struct signed_form {
    static constexpr bool TWO_ROWS = false;
    static constexpr uint32_t MOST_ROWS = 6;
    static constexpr uint32_t MOST_GROUPS = 1;
    static constexpr bool RAISED = false;
    typedef words stored;
    typedef shorts sum;

    static constexpr uint32_t vectors(uint32_t) { return 1; }
    static stored store(words bytes) { return bytes; }
    static void add_products(sum & to, const stored & weights, words x) {
        const __m256i sizes = _mm256_abs_epi8(raw(weights));
        to = added(to, pair_products(as_words(sizes), as_words(_mm256_sign_epi8(raw(x), raw(weights)))));
    }
    static ints scaled(const sum & of, factors by) { return times(of, by); }
};

// Bytes with signs, in halves of 4 bits whose sums fit into 16 bits for longer: where many rows are multiplied by them. On Zen 3
// Q8_0 takes 6 % less time with this than with signed_form. IQ4_XS takes 19 % more: its integer scales make sums of 32 bits early.
struct split_form {
    static constexpr bool TWO_ROWS = false;
    static constexpr uint32_t MOST_ROWS = 5;
    static constexpr uint32_t MOST_GROUPS = 1;
    static constexpr bool RAISED = true;
    struct stored {
        words low;
        words high;
    };
    struct sum {
        shorts low;
        shorts high;
    };

    static constexpr uint32_t vectors(uint32_t) { return plain_form::vectors(15); }
    static stored store(words bytes) {
        const words raised = bytes ^ all_bytes(0x80);
        return {moved(raised, 0, 0x0f), moved(raised, -4, 0x0f)};
    }
    static void add_products(sum & to, const stored & weights, words x) {
        to.low = added(to.low, pair_products(weights.low, x));
        to.high = added(to.high, pair_products(weights.high, x));
    }
    static ints scaled(const sum & of, factors by) {
        return times(of.low, by) + times(of.high, as_words(_mm256_slli_epi16(raw(by), 4)));
    }
};

template <class W> using form_of_one = std::conditional_t<W::SIGNED, signed_form, plain_form>;
// Whether W is a type in blocks of 256 (tiles_256.inl)
template <class W, class = void> constexpr bool IN_256 = false;
template <class W> constexpr bool IN_256<W, decltype(W::PER_SCALE, void())> = true;
template <class W> using signed_form_of_many = std::conditional_t<IN_256<W>, signed_form, split_form>;
template <class W> using form_of_many = std::conditional_t<W::SIGNED, signed_form_of_many<W>, plain_form>;

inline factors once() { return all(0x00010001u); }

} // namespace

} // namespace kvg::KVG_PRODUCTS
