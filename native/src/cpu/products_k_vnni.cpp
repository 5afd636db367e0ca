// K-quants, and other types in blocks of 256 that need no codebook, on x86 with AVX-512 VNNI, and with AMX.
#ifdef __x86_64__
#include "cpu/vnni_256.inl"
#include "cpu/vnni_kernels.h"

#include "cpu/amx_256.inl"

namespace kvg::products_vnni {

namespace {

// Bits of each byte, moved up, or down where `up` is negative.
inline __m512i moved(__m512i v, int up, uint8_t mask) {
    return _mm512_and_si512(up < 0 ? _mm512_srli_epi32(v, static_cast<uint32_t>(-up))
                                   : _mm512_slli_epi32(v, static_cast<uint32_t>(up)),
                            bytes(mask));
}

// `bits` of `from`, moved as above, beside others
inline __m512i joined_bits(__m512i others, __m512i from, int up, uint8_t bits) {
    const __m512i v =
        up < 0 ? _mm512_srli_epi32(from, static_cast<uint32_t>(-up)) : _mm512_slli_epi32(from, static_cast<uint32_t>(up));
    return _mm512_ternarylogic_epi32(others, v, bytes(bits), 0xf8); // others | (v & bits)
}

// Each half of a vector, moved down by some bits: what stays in a byte is where it should be.
inline __m512i moved_halves(__m512i v, int low, int high) {
    return _mm512_rorv_epi32(v, joined(_mm256_set1_epi32(low), _mm256_set1_epi32(high)));
}

// Bytes 2i and 2i + 1 of each lane, as a pair
inline __m512i pair_of(__m512i lanes, uint32_t i) { return picked(lanes, 0x80018000 + 0x00020002 * i); }

// Two F16, and 12 bytes of 8 scales and 8 minima of 6 bits: what Q4_K and Q5_K begin with. Words 1 and 2 have the first four scales and
// minima. Lower halves of the others are in word 3, their upper bits in words 1 and 2.
inline void unpack_scales_and_minima(tile & to, const weight_rows & rows) {
    __m512i words[4];
    rows.words(0, words);
    to.scale = low_halves(words[0]);
    to.pair_scale = _mm512_sub_ps(_mm512_setzero_ps(), high_halves(words[0]));
    const __m512i scales[2] = {moved(words[1], 0, 0x3f), joined_bits(moved(words[3], 0, 0x0f), words[1], -2, 0x30)};
    const __m512i minima[2] = {moved(words[2], 0, 0x3f), joined_bits(moved(words[3], -4, 0x0f), words[2], -2, 0x30)};
    for (uint32_t i = 0; i < 8; ++i) {
        to.scales[i] = byte_of(scales[i / 4], i % 4);
    }
    for (uint32_t i = 0; i < 4; ++i) {
        to.pairs[i] = pair_of(minima[i / 2], i % 2);
    }
}

// 256 numbers in 4 bits: scale * number - minimum
struct q4_k_weights {
    static constexpr size_t BYTES = 144;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool MINIMA = true;

    static void scales(tile & to, const weight_rows & rows) { unpack_scales_and_minima(to, rows); }
    template <class F> static void numbers(const weight_rows & rows, F to) {
#pragma GCC unroll 8
        for (uint32_t i = 0; i < 8; ++i) { // of 32 numbers the first or the last half, and those of the next 32
            __m512i both[4];
            rows.words(16 + i * 16, both);
            const uint32_t first = i / 2 * 16 + i % 2 * 4;
#pragma GCC unroll 4
            for (uint32_t j = 0; j < 4; ++j) {
                to(first + j, moved(both[j], 0, 0x0f));
                to(first + 8 + j, moved(both[j], -4, 0x0f));
            }
        }
    }
};

// As Q4_K, with 32 bytes of fifth bits before the numbers
struct q5_k_weights {
    static constexpr size_t BYTES = 176;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool MINIMA = true;

    static void scales(tile & to, const weight_rows & rows) { unpack_scales_and_minima(to, rows); }
    template <class F> static void numbers(const weight_rows & rows, F to) {
        __m512i bits[8];
        rows.words(16, bits);
        rows.words(32, bits + 4);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            __m512i both[4];
            rows.words(static_cast<size_t>(48 + i * 16), both);
            const int first = i / 2 * 16 + i % 2 * 4;
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const __m512i bit = bits[i % 2 * 4 + j];
                to(first + j, joined_bits(moved(both[j], 0, 0x0f), bit, 4 - i / 2 * 2, 0x10));
                to(first + 8 + j, joined_bits(moved(both[j], -4, 0x0f), bit, 3 - i / 2 * 2, 0x10));
            }
        }
    }
};

// 128 bytes of lower and 64 of higher bits of 256 numbers of 6, 16 scales of 8 bits, an F16: scale * (number - 32)
struct q6_k_weights {
    static constexpr size_t BYTES = 210;
    static constexpr uint32_t PER_SCALE = 16;
    static constexpr bool MINIMA = false;
    static constexpr uint32_t RAISED = 5;
    static constexpr bool IN_ORDER = true;

    struct of_row {};
    static void prepare(const uint8_t *, of_row &) {}
    static __m256i scales(const uint8_t * block, const of_row &) { return _mm256_cvtepi8_epi16(load_128(block + 192)); }
    static __m512i group(const uint8_t * block, const of_row &, uint32_t i) {
        const __m512i low = _mm512_loadu_si512(block + i / 2 * 64);
        const __m512i high = _mm512_broadcast_i64x4(load_256(block + 128 + i / 2 * 32));
        const int down = static_cast<int>(i % 2 * 4);
        return joined_bits(moved(low, -down, 0x0f), moved_halves(high, down - 4, down - 2), 0, 0x30);
    }
    static __m512 scale(const weight_rows & rows) { return rows.halves(208); }
};

// 64 bytes with 256 numbers of 2 bits: of each half, number 32 i + j in bits 2 i of byte j.
template <class F> inline void unpack_two_bits(const weight_rows & rows, size_t offset, F to) {
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) {
        __m512i four[4];
        rows.words(offset + i * 16, four);
#pragma GCC unroll 4
        for (uint32_t j = 0; j < 4; ++j) {
#pragma GCC unroll 4
            for (uint32_t k = 0; k < 4; ++k) {
                to(i / 2 * 32 + k * 8 + i % 2 * 4 + j, moved(four[j], -2 * static_cast<int>(k), 0x03));
            }
        }
    }
}

// 16 bytes of a scale and a minimum of 4 bits each, 256 numbers of 2 bits, two F16: scale * number - minimum
struct q2_k_weights {
    static constexpr size_t BYTES = 84;
    static constexpr uint32_t PER_SCALE = 16;
    static constexpr bool MINIMA = true;

    static void scales(tile & to, const weight_rows & rows) {
        __m512i words[4];
        rows.words(0, words);
        for (uint32_t i = 0; i < 4; ++i) {
            const __m512i scales = moved(words[i], 0, 0x0f);
            const __m512i minima = moved(words[i], -4, 0x0f);
            for (uint32_t j = 0; j < 4; ++j) {
                to.scales[4 * i + j] = byte_of(scales, j);
            }
            to.pairs[2 * i] = pair_of(minima, 0);
            to.pairs[2 * i + 1] = pair_of(minima, 1);
        }
        const __m512i both = rows.word(80);
        to.scale = low_halves(both);
        to.pair_scale = _mm512_sub_ps(_mm512_setzero_ps(), high_halves(both));
    }
    template <class F> static void numbers(const weight_rows & rows, F to) { unpack_two_bits(rows, 16, to); }
};

template <> constexpr bool IN_BYTES<q2_k_weights> = true; // at most 3 times 15

// 32 bytes of third bits, 256 numbers of 2 bits, 16 scales of 6 bits in 12 bytes, an F16: (scale - 32) * (number + 4 * bit - 4)
struct q3_k_weights {
    static constexpr size_t BYTES = 110;
    static constexpr uint32_t PER_SCALE = 16;
    static constexpr bool MINIMA = false;

    static void scales(tile & to, const weight_rows & rows) {
        __m512i words[4]; // the last 16 bytes: the scales' are the first three
        rows.words(94, words);
        unpack_scales(to, words);
        to.scale = rows.halves(108);
        lower<PER_SCALE>(to, 2);
    }
    template <class F> static void numbers(const weight_rows & rows, F to) {
        __m512i bits[8];
        rows.words(0, bits);
        rows.words(16, bits + 4);
        unpack_two_bits(rows, 32, [&](uint32_t j, __m512i two) __attribute__((always_inline)) {
            to(j, joined_bits(two, bits[j % 8], 2 - static_cast<int>(j / 8), 0x04));
        });
    }

private:
    // Of scales 0 to 7 and 8 to 15 the lower halves, in words 0 and 1; of four times four the upper bits, in word 2.
    static void unpack_scales(tile & to, const __m512i * last) {
        const auto shifted = [&](uint32_t i) { // past two bytes
            return _mm512_or_si512(_mm512_srli_epi32(last[i], 16), _mm512_slli_epi32(last[i + 1], 16));
        };
        const __m512i high = shifted(2);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m512i low = moved(shifted(static_cast<uint32_t>(i % 2)), i < 2 ? 0 : -4, 0x0f);
            const __m512i four = joined_bits(low, high, 4 - 2 * i, 0x30);
            for (uint32_t j = 0; j < 4; ++j) {
                to.scales[static_cast<uint32_t>(i) * 4 + j] = _mm512_sub_epi32(byte_of(four, j), _mm512_set1_epi32(32));
            }
        }
    }
};

// An F16, 8 scales of 6 bits (two bytes of upper bits, four of lower), 256 numbers of 4 bits that stand for others: (scale - 32) * number
struct iq4_xs_weights {
    static constexpr size_t BYTES = 136;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool MINIMA = false;

    static void scales(tile & to, const weight_rows & rows) {
        const __m512i first = rows.word(0);
        const __m512i low = rows.word(4);
        to.scale = low_halves(first);
        for (uint32_t i = 0; i < 8; ++i) {
            const __m512i four = _mm512_and_si512(_mm512_srli_epi32(low, 4 * i), _mm512_set1_epi32(0x0f));
            const __m512i two = _mm512_and_si512(_mm512_srli_epi32(first, 16 + 2 * i), _mm512_set1_epi32(0x03));
            to.scales[i] = _mm512_sub_epi32(_mm512_or_si512(four, _mm512_slli_epi32(two, 4)), _mm512_set1_epi32(32));
        }
        lower<PER_SCALE>(to, 7);
    }
    template <class F> static void numbers(const weight_rows & rows, F to) {
        const __m512i table = four_bit_table();
#pragma GCC unroll 8
        for (uint32_t i = 0; i < 8; ++i) {
            __m512i both[4];
            rows.words(8 + i * 16, both);
#pragma GCC unroll 4
            for (uint32_t j = 0; j < 4; ++j) {
                to(i * 8 + j, _mm512_shuffle_epi8(table, moved(both[j], 0, 0x0f)));
                to(i * 8 + 4 + j, _mm512_shuffle_epi8(table, moved(both[j], -4, 0x0f)));
            }
        }
    }
};

// Numbers 0, 1 and 2 stand for -1, 0 and 1.
inline void lower_thirds(tile & to) {
    for (uint32_t i = 0; i < 4; ++i) {
        to.pairs[i] = _mm512_set1_epi32(-1);
    }
}

// 256 numbers of 2 bits, an F16
struct tq2_0_weights {
    static constexpr size_t BYTES = 66;
    static constexpr uint32_t PER_SCALE = BLOCK;
    static constexpr bool MINIMA = false;

    static void scales(tile & to, const weight_rows & rows) {
        to.scale = rows.halves(64);
        lower_thirds(to);
    }
    template <class F> static void numbers(const weight_rows & rows, F to) { unpack_two_bits(rows, 0, to); }
};

// 5 numbers in each of 48 bytes, 4 in each of 4, an F16. Bytes are fractions of 256, and numbers their digits to the base of 3.
struct tq1_0_weights {
    static constexpr size_t BYTES = 54;
    static constexpr uint32_t PER_SCALE = BLOCK;
    static constexpr bool MINIMA = false;

    static void scales(tile & to, const weight_rows & rows) {
        to.scale = rows.halves(52);
        lower_thirds(to);
    }
    template <class F> static void numbers(const weight_rows & rows, F to) {
        __m512i fractions[12];
        rows.words(0, fractions);
        rows.words(16, fractions + 4);
        rows.words(32, fractions + 8);
#pragma GCC unroll 5
        for (uint32_t digit = 0; digit < 5; ++digit) {
#pragma GCC unroll 8
            for (uint32_t i = 0; i < 8; ++i) {
                to(digit * 8 + i, next_digit(fractions[i]));
            }
#pragma GCC unroll 4
            for (uint32_t i = 0; i < 4; ++i) {
                to(40 + digit * 4 + i, next_digit(fractions[i + 8]));
            }
        }
        __m512i last = rows.word(48);
#pragma GCC unroll 4
        for (uint32_t digit = 0; digit < 4; ++digit) {
            to(60 + digit, next_digit(last));
        }
    }

private:
    // The whole part of three times a fraction, which then has what is left.
    static __m512i next_digit(__m512i & fraction) {
        const __mmask64 one = _mm512_cmpge_epu8_mask(fraction, bytes(86));
        const __mmask64 two = _mm512_cmpge_epu8_mask(fraction, bytes(171));
        fraction = _mm512_add_epi8(fraction, _mm512_add_epi8(fraction, fraction));
        const __m512i digit = _mm512_maskz_mov_epi8(one, bytes(1));
        return _mm512_mask_mov_epi8(digit, two, bytes(2));
    }
};

template <class W> constexpr product_kernel by_vnni = {by_256, run<W>};
template <class W> constexpr product_kernel by_amx = {by_256, run_by_amx<W>};
template <class W> constexpr type_kernels kernels_of = {&by_vnni<W>, &by_amx<W>};

} // namespace

const type_kernels q2_k = kernels_of<q2_k_weights>;
const type_kernels q3_k = kernels_of<q3_k_weights>;
const type_kernels q4_k = kernels_of<q4_k_weights>;
const type_kernels q5_k = kernels_of<q5_k_weights>;
const type_kernels q6_k = kernels_of<q6_k_weights>;
const type_kernels iq4_xs = kernels_of<iq4_xs_weights>;
const type_kernels tq1_0 = kernels_of<tq1_0_weights>;
const type_kernels tq2_0 = kernels_of<tq2_0_weights>;

} // namespace kvg::products_vnni
#endif
