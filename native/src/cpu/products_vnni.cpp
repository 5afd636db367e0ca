// Types in blocks of 32 on x86 with AVX-512 VNNI.
#ifdef __x86_64__
#include "cpu/vnni_32.inl"

namespace kvg::products_vnni {

namespace {

inline block_scales scales_alone(__m512 scales) { return {scales, _mm512_setzero_ps()}; }

// An F16, 32 signed bytes
struct q8_0_weights {
    static constexpr size_t BYTES = 34;
    static constexpr bool MINIMA = false;

    static block_halves numbers(const four_blocks & from) {
        return {_mm512_xor_si512(from.bytes(2), bytes(0x80)), _mm512_xor_si512(from.bytes(18), bytes(0x80))};
    }
    static block_scales scales(const weight_rows & rows, size_t offset) { return scales_alone(rows.halves(offset)); }
};

// Numbers of 4 bits: the lower halves of a block's 16 bytes are its numbers 0 to 15, the upper ones are the rest. Each is moved so that its
// lowest bit is bit BIT.
template <int BIT> inline block_halves nibbles(__m512i both) {
    const __m512i mask = bytes(0x0f << BIT);
    return {_mm512_and_si512(_mm512_slli_epi16(both, BIT), mask), _mm512_and_si512(_mm512_srli_epi16(both, 4 - BIT), mask)};
}

// Adds `value` to numbers whose bit is set in the four bytes at `offset` of their block.
inline block_halves add_bits(const block_halves & numbers, const four_blocks & from, size_t offset, uint8_t value) {
    const auto half = [&](size_t at) {
        const auto bits = [&](uint32_t i) { return uint64_t{load<uint16_t>(from.block(i) + at)} << (16 * i); };
        return bits(0) | bits(1) | bits(2) | bits(3);
    };
    return {_mm512_mask_add_epi8(numbers.low, half(offset), numbers.low, bytes(value)),
            _mm512_mask_add_epi8(numbers.high, half(offset + 2), numbers.high, bytes(value))};
}

// The bytes that numbers of 4 bits stand for.
inline block_halves looked_up(__m512i table, const block_halves & numbers) {
    return {_mm512_shuffle_epi8(table, numbers.low), _mm512_shuffle_epi8(table, numbers.high)};
}

// An F16, 32 numbers of 4 bits: scale * (number - 8). Bytes are 16 times the number.
struct q4_0_weights {
    static constexpr size_t BYTES = 18;
    static constexpr bool MINIMA = false;

    static block_halves numbers(const four_blocks & from) { return nibbles<4>(from.bytes(2)); }
    static block_scales scales(const weight_rows & rows, size_t offset) {
        return scales_alone(_mm512_mul_ps(rows.halves(offset), _mm512_set1_ps(1.0f / 16)));
    }
};

// Two F16, 32 numbers of 4 bits: scale * number + minimum
struct q4_1_weights {
    static constexpr size_t BYTES = 20;
    static constexpr bool MINIMA = true;

    static block_halves numbers(const four_blocks & from) { return nibbles<0>(from.bytes(4)); }
    static block_scales scales(const weight_rows & rows, size_t offset) {
        const __m512i both = rows.words(offset);
        return {low_halves(both), high_halves(both)};
    }
};

// An F16, 32 bits, 32 numbers of 4 bits: scale * (number + 16 * bit - 16). Bytes are 8 times the number.
struct q5_0_weights {
    static constexpr size_t BYTES = 22;
    static constexpr bool MINIMA = false;

    static block_halves numbers(const four_blocks & from) { return add_bits(nibbles<3>(from.bytes(6)), from, 2, 0x80); }
    static block_scales scales(const weight_rows & rows, size_t offset) {
        return scales_alone(_mm512_mul_ps(rows.halves(offset), _mm512_set1_ps(1.0f / 8)));
    }
};

// Two F16, 32 bits, 32 numbers of 4 bits: scale * (number + 16 * bit) + minimum
struct q5_1_weights {
    static constexpr size_t BYTES = 24;
    static constexpr bool MINIMA = true;

    static block_halves numbers(const four_blocks & from) { return add_bits(nibbles<0>(from.bytes(8)), from, 4, 0x10); }
    static block_scales scales(const weight_rows & rows, size_t offset) { return q4_1_weights::scales(rows, offset); }
};

// An F16, 32 numbers of 4 bits that stand for others
struct iq4_nl_weights {
    static constexpr size_t BYTES = 18;
    static constexpr bool MINIMA = false;

    static block_halves numbers(const four_blocks & from) { return looked_up(four_bit_table(), nibbles<0>(from.bytes(2))); }
    static block_scales scales(const weight_rows & rows, size_t offset) { return scales_alone(rows.halves(offset)); }
};

// A power of two, 32 floats of 4 bits: a sign, two bits of exponent, one of mantissa. Bytes are 16 times the float.
struct mxfp4_weights {
    static constexpr size_t BYTES = 17;
    static constexpr bool MINIMA = false;

    static block_halves numbers(const four_blocks & from) {
        const __m128i floats = _mm_setr_epi8(0, 8, 16, 24, 32, 48, 64, 96, 0, -8, -16, -24, -32, -48, -64, -96);
        return looked_up(raised(floats), nibbles<0>(from.bytes(1)));
    }
    static block_scales scales(const weight_rows & rows, size_t offset) {
        // 2^(exponent - 127): a float has these bits, except that of 0
        const __m512i exponents = rows.bytes(offset);
        const __m512i least = _mm512_set1_epi32(0x00400000);
        const __mmask16 is_least = _mm512_testn_epi32_mask(exponents, exponents);
        const __m512i power = _mm512_mask_mov_epi32(_mm512_slli_epi32(exponents, 23), is_least, least);
        return scales_alone(_mm512_mul_ps(_mm512_castsi512_ps(power), _mm512_set1_ps(1.0f / 16)));
    }
};

} // namespace

extern const product_kernel q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, mxfp4;
const product_kernel q8_0 = {by_32, run<q8_0_weights>};
const product_kernel q4_0 = {by_32, run<q4_0_weights>};
const product_kernel q4_1 = {by_32, run<q4_1_weights>};
const product_kernel q5_0 = {by_32, run<q5_0_weights>};
const product_kernel q5_1 = {by_32, run<q5_1_weights>};
const product_kernel iq4_nl = {by_32, run<iq4_nl_weights>};
const product_kernel mxfp4 = {by_32, run<mxfp4_weights>};

} // namespace kvg::products_vnni
#endif
