// Types in blocks of 32 on x86 with AVX-512 VNNI, and with AMX.
#ifdef __x86_64__
#include "cpu/vnni_32.inl"
#include "cpu/vnni_kernels.h"

#include "cpu/amx_32.inl"

namespace kvg::products_vnni {

namespace {

inline block_scales scales_alone(__m512 scales) { return {scales, _mm512_setzero_ps()}; }

template <class W> struct scales_of {
    block_scales scales;
    void set(const weight_rows & rows) { scales = W::scales(rows); }
};

// Products with 16 bytes of 4 bits at `offset`, whose lower halves are the first 16 numbers. low(i, v) and high(i, v) are the numbers
// of v, of rows i, i + 4, i + 8 and i + 12.
template <class F, class G>
[[gnu::always_inline]] inline four_sums products_of_nibbles(const weight_rows & rows, ptrdiff_t offset, const uint8_t * x,
                                                            F low, G high) {
    const __m512i first = _mm512_broadcast_i32x4(load_128(x));
    const __m512i others = _mm512_broadcast_i32x4(load_128(x + 16));
    four_sums sums;
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) {
        const __m512i both = rows.fourths(i, offset);
        sums.of[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), low(i, both), first);
        sums.of[i] = _mm512_dpbusd_epi32(sums.of[i], high(i, both), others);
    }
    return sums;
}
template <class W> inline four_sums products_of_nibbles(const weight_rows & rows, ptrdiff_t offset, const uint8_t * x) {
    return products_of_nibbles(
        rows, offset, x, [](size_t, __m512i v) { return W::low(v); }, [](size_t, __m512i v) { return W::high(v); });
}

// Two words of 16 bits of each row, of those of doubles(): the first of all rows, then the second. order: where rows begin, twice
alignas(64) constexpr int16_t ROW_BY_ROW[32] = {0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60,
                                                0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60};
inline __m512i two_words(const __m512i * doubles, int first, int second, const int16_t * order = ROW_BY_ROW) {
    const __m512i word =
        joined(_mm256_set1_epi16(static_cast<int16_t>(first)), _mm256_set1_epi16(static_cast<int16_t>(second)));
    return _mm512_permutex2var_epi16(doubles[0], _mm512_add_epi16(_mm512_load_si512(order), word), doubles[1]);
}
inline __m512 lower_floats(__m512i halves) { return _mm512_cvtph_ps(_mm512_castsi512_si256(halves)); }
inline __m512 upper_floats(__m512i halves) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)); }
inline block_scales scale_and_minimum(const __m512i * doubles) {
    const __m512i both = two_words(doubles, 0, 1);
    return {lower_floats(both), upper_floats(both)};
}

// Fifth bits as masks of vectors with numbers of rows i, i + 4, i + 8 and i + 12
class fifth_bits {
public:
    // Bits are words `first` and first + 1 of those of doubles().
    void set(const __m512i * doubles, int first) {
        alignas(64) static constexpr int16_t ROWS[32] = {0, 16, 32, 48, 4, 20, 36, 52, 8, 24, 40, 56, 12, 28, 44, 60,
                                                         0, 16, 32, 48, 4, 20, 36, 52, 8, 24, 40, 56, 12, 28, 44, 60};
        _mm512_store_si512(masks_, two_words(doubles, first, first + 1, ROWS));
        asm("" : "+m"(masks_)); // else they would be taken out of the vector one by one, which is slower than reading them
    }
    // Numbers 0 to 15 of a row, or 16 to 31
    __mmask64 low(size_t i) const { return masks_[i]; }
    __mmask64 high(size_t i) const { return masks_[4 + i]; }

private:
    alignas(64) uint64_t masks_[8];
};

// What a block begins with: scales, which W::of_doubles() takes out of it, and fifth bits from its word W::FIFTHS of 16 bits on
template <class W> struct head_with_fifths {
    block_scales scales;
    fifth_bits bits;
    void set(const weight_rows & rows) {
        __m512i doubles[2];
        rows.doubles(0, doubles);
        bits.set(doubles, W::FIFTHS);
        scales = W::of_doubles(doubles);
    }
};

// As products_of_nibbles, with `value` more where the fifth bit is set
template <class W>
inline four_sums products_of_fives(const weight_rows & rows, ptrdiff_t offset, const uint8_t * x, const fifth_bits & bits,
                                   uint8_t value) {
    return products_of_nibbles(
        rows, offset, x,
        [&](size_t i, __m512i v) {
            const __m512i four = W::low(v);
            return _mm512_mask_add_epi8(four, bits.low(i), four, bytes(value));
        },
        [&](size_t i, __m512i v) {
            const __m512i four = W::high(v);
            return _mm512_mask_add_epi8(four, bits.high(i), four, bytes(value));
        });
}

// An F16, 32 signed bytes
struct q8_0_weights {
    static constexpr size_t BYTES = 34;
    static constexpr form FORM = RAISED;

    static block_numbers numbers(const weight_rows & rows) {
        block_numbers numbers;
        rows.words(2, numbers.at);
        rows.words(18, numbers.at + 4);
        for (__m512i & four : numbers.at) {
            four = _mm512_xor_si512(four, bytes(0x80));
        }
        return numbers;
    }
    static block_scales scales(const weight_rows & rows) { return scales_alone(rows.halves(0)); }
    using head = scales_of<q8_0_weights>;
    static four_sums products(const weight_rows & rows, ptrdiff_t offset, const uint8_t * x, const head &) {
        const __m512i twice = _mm512_broadcast_i64x4(load_256(x));
        const auto two = [&](size_t row) { // and the fourth after it
            const __m512i numbers = joined(load_256(rows.at(row) + offset + 2), load_256(rows.at(row + 4) + offset + 2));
            return _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_xor_si512(numbers, bytes(0x80)), twice);
        };
        four_sums sums;
        for (size_t i = 0; i < 4; ++i) {
            sums.of[i] = sums_of_halves(two(i), two(i + 8));
        }
        return sums;
    }
};

// Numbers of 4 bits: the lower halves of the 16 bytes at `offset` are numbers 0 to 15, the upper ones are the rest. Each is moved so that
// its lowest bit is bit BIT.
template <int BIT> inline block_numbers nibbles(const weight_rows & rows, size_t offset) {
    block_numbers numbers;
    rows.words(offset, numbers.at);
    const __m512i mask = bytes(0x0f << BIT);
    for (uint32_t i = 0; i < 4; ++i) {
        const __m512i both = numbers.at[i];
        numbers.at[i] = _mm512_and_si512(_mm512_slli_epi16(both, BIT), mask);
        numbers.at[i + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4 - BIT), mask);
    }
    return numbers;
}

// Adds `value` to number i where bit i of the word at `offset` is set.
inline block_numbers add_bits(block_numbers numbers, const weight_rows & rows, size_t offset, uint8_t value) {
    const __m512i bits = rows.word(offset);
    for (uint32_t i = 0; i < 4; ++i) {
        const __m512i eight = picked(bits, 0x01010101 * i);
        const auto add = [&](__m512i & to, int32_t which) {
            to = _mm512_mask_add_epi8(to, _mm512_test_epi8_mask(eight, _mm512_set1_epi32(which)), to, bytes(value));
        };
        add(numbers.at[2 * i], 0x08040201);
        add(numbers.at[2 * i + 1], static_cast<int32_t>(0x80402010));
    }
    return numbers;
}

// The bytes that numbers of 4 bits stand for.
inline block_numbers looked_up(__m512i table, block_numbers numbers) {
    for (__m512i & four : numbers.at) {
        four = _mm512_shuffle_epi8(table, four);
    }
    return numbers;
}

// The first or the second F16 of each lane
inline __m512 half_of(__m512i lanes, uint32_t i) { return i == 0 ? low_halves(lanes) : high_halves(lanes); }

// An F16, 32 numbers of 4 bits: scale * (number - 8). Bytes are 16 times the number.
struct q4_0_weights {
    static constexpr size_t BYTES = 18;
    static constexpr form FORM = RAISED;

    static block_numbers numbers(const weight_rows & rows) { return nibbles<4>(rows, 2); }
    static block_scales scales(const weight_rows & rows) {
        return scales_alone(_mm512_mul_ps(rows.halves(0), _mm512_set1_ps(1.0f / 16)));
    }
    static __m512i low(__m512i v) { return high(_mm512_slli_epi16(v, 4)); }
    static __m512i high(__m512i v) { return _mm512_and_si512(v, bytes(0xf0)); }
    static __m512 scales_of(__m512i v, uint32_t i) { return _mm512_mul_ps(half_of(v, i), _mm512_set1_ps(1.0f / 16)); }
};
template <> constexpr bool OF_NIBBLES<q4_0_weights> = true;

// Two F16, 32 numbers of 4 bits: scale * number + minimum
struct q4_1_weights {
    static constexpr size_t BYTES = 20;
    static constexpr form FORM = MINIMUM;

    static block_numbers numbers(const weight_rows & rows) { return nibbles<0>(rows, 4); }
    static block_scales scales(const weight_rows & rows) {
        const __m512i both = rows.word(0);
        return {low_halves(both), high_halves(both)};
    }
    static __m512i low(__m512i v) { return _mm512_and_si512(v, bytes(0x0f)); }
    static __m512i high(__m512i v) { return low(_mm512_srli_epi16(v, 4)); }
    struct head {
        block_scales scales;
        void set(const weight_rows & rows) {
            __m512i doubles[2];
            rows.doubles(0, doubles);
            scales = scale_and_minimum(doubles);
        }
    };
    static four_sums products(const weight_rows & rows, ptrdiff_t offset, const uint8_t * x, const head &) {
        return products_of_nibbles<q4_1_weights>(rows, offset + 4, x);
    }
};

// An F16, 32 bits, 32 numbers of 4 bits: scale * (number + 16 * bit - 16). Bytes are 8 times the number.
struct q5_0_weights {
    static constexpr size_t BYTES = 22;
    static constexpr form FORM = RAISED;

    static block_numbers numbers(const weight_rows & rows) { return add_bits(nibbles<3>(rows, 6), rows, 2, 0x80); }
    static block_scales scales(const weight_rows & rows) {
        return scales_alone(_mm512_mul_ps(rows.halves(0), _mm512_set1_ps(1.0f / 8)));
    }
    static __m512i low(__m512i v) { return _mm512_and_si512(_mm512_slli_epi16(v, 3), bytes(0x78)); }
    static __m512i high(__m512i v) { return _mm512_and_si512(_mm512_srli_epi16(v, 1), bytes(0x78)); }
    static constexpr int FIFTHS = 1;
    static block_scales of_doubles(const __m512i * doubles) {
        return scales_alone(_mm512_mul_ps(lower_floats(two_words(doubles, 0, 0)), _mm512_set1_ps(1.0f / 8)));
    }
    using head = head_with_fifths<q5_0_weights>;
    static four_sums products(const weight_rows & rows, ptrdiff_t offset, const uint8_t * x, const head & head) {
        return products_of_fives<q5_0_weights>(rows, offset + 6, x, head.bits, 0x80);
    }
};

// Two F16, 32 bits, 32 numbers of 4 bits: scale * (number + 16 * bit) + minimum
struct q5_1_weights {
    static constexpr size_t BYTES = 24;
    static constexpr form FORM = MINIMUM;

    static block_numbers numbers(const weight_rows & rows) { return add_bits(nibbles<0>(rows, 8), rows, 4, 0x10); }
    static block_scales scales(const weight_rows & rows) { return q4_1_weights::scales(rows); }
    static constexpr int FIFTHS = 2;
    static block_scales of_doubles(const __m512i * doubles) { return scale_and_minimum(doubles); }
    using head = head_with_fifths<q5_1_weights>;
    static four_sums products(const weight_rows & rows, ptrdiff_t offset, const uint8_t * x, const head & head) {
        return products_of_fives<q4_1_weights>(rows, offset + 8, x, head.bits, 0x10);
    }
};

// An F16, 32 numbers of 4 bits that stand for others
struct iq4_nl_weights {
    static constexpr size_t BYTES = 18;
    static constexpr form FORM = RAISED;

    static block_numbers numbers(const weight_rows & rows) { return looked_up(four_bit_table(), nibbles<0>(rows, 2)); }
    static block_scales scales(const weight_rows & rows) { return scales_alone(rows.halves(0)); }
    static __m512i low(__m512i v) { return _mm512_shuffle_epi8(four_bit_table(), _mm512_and_si512(v, bytes(0x0f))); }
    static __m512i high(__m512i v) { return low(_mm512_srli_epi16(v, 4)); }
    static __m512 scales_of(__m512i v, uint32_t i) { return half_of(v, i); }
};
template <> constexpr bool OF_NIBBLES<iq4_nl_weights> = true;

// Floats of 4 bits: a sign, two bits of exponent, one of mantissa. Bytes are 16 times the float.
inline __m512i table_of_floats() {
    return raised(_mm_setr_epi8(0, 8, 16, 24, 32, 48, 64, 96, 0, -8, -16, -24, -32, -48, -64, -96));
}

// A power of two, 32 floats of 4 bits
struct mxfp4_weights {
    static constexpr size_t BYTES = 17;
    static constexpr form FORM = RAISED;

    static block_numbers numbers(const weight_rows & rows) { return looked_up(table_of_floats(), nibbles<0>(rows, 1)); }
    static block_scales scales(const weight_rows & rows) { return scales_alone(powers(rows.bytes(0))); }
    static __m512i low(__m512i v) { return _mm512_shuffle_epi8(table_of_floats(), _mm512_and_si512(v, bytes(0x0f))); }
    static __m512i high(__m512i v) { return low(_mm512_srli_epi16(v, 4)); }
    static __m512 scales_of(__m512i v, uint32_t i) {
        return powers(_mm512_and_si512(_mm512_srli_epi32(v, 8 * i), _mm512_set1_epi32(0xff)));
    }

private:
    // Sixteenths of 2^(exponent - 127): a float has these bits, except that of 0.
    static __m512 powers(__m512i exponents) {
        const __m512i least = _mm512_set1_epi32(0x00400000);
        const __mmask16 is_least = _mm512_testn_epi32_mask(exponents, exponents);
        const __m512i power = _mm512_mask_mov_epi32(_mm512_slli_epi32(exponents, 23), is_least, least);
        return _mm512_mul_ps(_mm512_castsi512_ps(power), _mm512_set1_ps(1.0f / 16));
    }
};
template <> constexpr bool OF_NIBBLES<mxfp4_weights> = true;

// Four scales, each a float of 7 bits, 4 of them exponent; 64 floats of 4 bits, of which 8 bytes have 16. This is a pair of blocks.
struct nvfp4_weights {
    static constexpr size_t BYTES = 18;
    static constexpr form FORM = HALVES;

    static block_numbers numbers(const weight_rows & rows, uint32_t half) {
        __m512i both[4];
        rows.words(4 + half * 16, both);
        block_numbers numbers;
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t first = i / 2 * 4 + i % 2;
            numbers.at[first] = _mm512_and_si512(both[i], bytes(0x0f));
            numbers.at[first + 2] = _mm512_and_si512(_mm512_srli_epi16(both[i], 4), bytes(0x0f));
        }
        return looked_up(table_of_floats(), numbers);
    }
    static block_scales scales(const weight_rows & rows, uint32_t half) {
        return {float_of(rows.bytes(half * 2)), float_of(rows.bytes(half * 2 + 1))};
    }

private:
    // Sixteenths of scales, as bytes are 16 times the float. 127 stands for 0; the eighth bit for nothing.
    static __m512 float_of(__m512i scales) {
        const __m512i bits = _mm512_and_si512(scales, _mm512_set1_epi32(0x7f));
        const __m512i normal = _mm512_add_epi32(_mm512_slli_epi32(bits, 20), _mm512_set1_epi32((127 - 7 - 4) << 23));
        const __mmask16 is_small = _mm512_cmplt_epi32_mask(bits, _mm512_set1_epi32(8));
        const __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(bits), _mm512_set1_ps(0x1p-13f));
        const __m512 either = _mm512_mask_mov_ps(_mm512_castsi512_ps(normal), is_small, small);
        return _mm512_maskz_mov_ps(_mm512_cmpneq_epi32_mask(scales, _mm512_set1_epi32(127)), either);
    }
};

template <class W> constexpr product_kernel by_vnni = {by_32, run<W>};
template <class W> constexpr product_kernel by_amx = {by_32, run_by_amx<W>};
template <class W> constexpr type_kernels kernels_of = {&by_vnni<W>, &by_amx<W>};

} // namespace

const type_kernels q8_0 = kernels_of<q8_0_weights>;
const type_kernels q4_0 = kernels_of<q4_0_weights>;
const type_kernels q4_1 = kernels_of<q4_1_weights>;
const type_kernels q5_0 = kernels_of<q5_0_weights>;
const type_kernels q5_1 = kernels_of<q5_1_weights>;
const type_kernels iq4_nl = kernels_of<iq4_nl_weights>;
const type_kernels mxfp4 = kernels_of<mxfp4_weights>;
const type_kernels nvfp4 = {&by_vnni<nvfp4_weights>, nullptr}; // a block of HALVES would have two sums

} // namespace kvg::products_vnni
#endif
