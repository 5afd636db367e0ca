// K-quants, and other types in blocks of 256 that need no codebook. Included behind tiles_256.inl and types_32.inl.

namespace kvg::KVG_PRODUCTS {

namespace {

// `bits` of `from`, moved, beside others
inline words joined_bits(words others, words from, int up, uint8_t bits) { return others | moved(from, up, bits); }

// Bytes less 32
inline words less_32(words bytes) { return reinterpret_cast<words>(reinterpret_cast<signed_bytes>(bytes) - 32); }

// Two F16, and 12 bytes of 8 scales and 8 minima of 6 bits: what Q4_K and Q5_K begin with. Words 1 and 2 have the first four scales and
// minima. Lower halves of the others are in word 3, their upper bits in words 1 and 2.
inline void unpack_scales_and_minima(in_256::block_scales & to, const weight_rows & rows) {
    words four[4];
    rows.turned(0, four);
    floats of_minima;
    both_halves(four[0], to.scale, of_minima);
    to.pair_scale = -of_minima;
    to.integers[0] = moved(four[1], 0, 0x3f);
    to.integers[1] = joined_bits(moved(four[3], 0, 0x0f), four[1], -2, 0x30);
    to.minima[0] = moved(four[2], 0, 0x3f);
    to.minima[1] = joined_bits(moved(four[3], -4, 0x0f), four[2], -2, 0x30);
}

// 256 numbers in 4 bits: scale * number - minimum
struct q4_k_weights {
    static constexpr size_t BYTES = 144;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 15;
    static constexpr bool MINIMA = true;

    static void scales(in_256::block_scales & to, const weight_rows & rows) { unpack_scales_and_minima(to, rows); }
    template <class F> static void numbers(const weight_rows & rows, F to) {
#pragma GCC unroll 8
        for (uint32_t i = 0; i < 8; ++i) { // of 32 numbers the first or the last half, and those of the next 32
            words low[4];
            words high[4];
            rows.turned(16 + i * 16, low);
            for (uint32_t j = 0; j < 4; ++j) {
                high[j] = moved(low[j], -4, 0x0f);
                low[j] = moved(low[j], 0, 0x0f);
            }
            const uint32_t first = i / 2 * 16 + i % 2 * 4;
            to(first, low);
            to(first + 8, high);
        }
    }
};

// As Q4_K, with 32 bytes of fifth bits before the numbers
struct q5_k_weights {
    static constexpr size_t BYTES = 176;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 31;
    static constexpr bool MINIMA = true;

    static void scales(in_256::block_scales & to, const weight_rows & rows) { unpack_scales_and_minima(to, rows); }
    template <class F> static void numbers(const weight_rows & rows, F to) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) { // of each 32 numbers
            words bits[4];
            rows.turned(static_cast<size_t>(16 + half * 16), bits);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                words low[4];
                words high[4];
                rows.turned(static_cast<size_t>(48 + i * 32 + half * 16), low);
                for (int j = 0; j < 4; ++j) {
                    high[j] = joined_bits(moved(low[j], -4, 0x0f), bits[j], 3 - i * 2, 0x10);
                    low[j] = joined_bits(moved(low[j], 0, 0x0f), bits[j], 4 - i * 2, 0x10);
                }
                const auto first = static_cast<uint32_t>(i * 16 + half * 4);
                to(first, low);
                to(first + 8, high);
            }
        }
    }
};

// 128 bytes of lower and 64 of higher bits of 256 numbers of 6, 16 scales of 8 bits, an F16: scale * (number - 32)
struct q6_k_weights {
    static constexpr size_t BYTES = 210;
    static constexpr uint32_t PER_SCALE = 16;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 63;
    static constexpr uint32_t OFFSET_BITS = 5;
    static constexpr bool MINIMA = false;

    static void scales(in_256::block_scales & to, const weight_rows & rows) {
        rows.turned(192, to.integers);
        to.scale = rows.halves(208);
    }
    template <class F> static void numbers(const weight_rows & rows, F to) {
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; ++i) { // of each half 16 numbers of four times 32, twice
            const uint32_t half = i / 2;
            const uint32_t first = half * 32 + i % 2 * 4;
            words high[4];
            rows.turned(128 + i * 16, high);
#pragma GCC unroll 2
            for (int k = 0; k < 2; ++k) { // 32 numbers, and those 64 further on
                words near[4];
                words far[4];
                rows.turned(half * 64 + i % 2 * 16 + static_cast<uint32_t>(k) * 32, near);
                for (uint32_t j = 0; j < 4; ++j) {
                    far[j] = joined_bits(moved(near[j], -4, 0x0f), high[j], -2 * k, 0x30);
                    near[j] = joined_bits(moved(near[j], 0, 0x0f), high[j], 4 - 2 * k, 0x30);
                }
                to(first + static_cast<uint32_t>(k) * 8, near);
                to(first + static_cast<uint32_t>(k) * 8 + 16, far);
            }
        }
    }
};

// 64 bytes with 256 numbers of 2 bits: of each half, number 32 i + j in bits 2 i of byte j.
template <class F> inline void unpack_two_bits(const weight_rows & rows, size_t offset, F to) {
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) {
        words all_bits[4];
        rows.turned(offset + i * 16, all_bits);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            words four[4];
            for (uint32_t j = 0; j < 4; ++j) {
                four[j] = moved(all_bits[j], -2 * k, 0x03);
            }
            to(i / 2 * 32 + static_cast<uint32_t>(k) * 8 + i % 2 * 4, four);
        }
    }
}

// 16 bytes of a scale and a minimum of 4 bits each, 256 numbers of 2 bits, two F16: scale * number - minimum
struct q2_k_weights {
    static constexpr size_t BYTES = 84;
    static constexpr uint32_t PER_SCALE = 16;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 3;
    static constexpr bool MINIMA = true;

    static void scales(in_256::block_scales & to, const weight_rows & rows) {
        words four[4];
        rows.turned(0, four);
        for (uint32_t i = 0; i < 4; ++i) {
            to.integers[i] = moved(four[i], 0, 0x0f);
            to.minima[i] = moved(four[i], -4, 0x0f);
        }
        floats of_minima;
        both_halves(rows.word(80), to.scale, of_minima);
        to.pair_scale = -of_minima;
    }
    template <class F> static void numbers(const weight_rows & rows, F to) { unpack_two_bits(rows, 16, to); }
};

// 32 bytes of third bits, 256 numbers of 2 bits, 16 scales of 6 bits in 12 bytes, an F16: (scale - 32) * (number + 4 * bit - 4)
struct q3_k_weights {
    static constexpr size_t BYTES = 110;
    static constexpr uint32_t PER_SCALE = 16;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 7;
    static constexpr uint32_t OFFSET_BITS = 2;
    static constexpr bool MINIMA = false;

    // Of scales 0 to 7 and 8 to 15 the lower halves, in words 0 and 1 of 12 bytes; of four times four the upper bits, in word 2.
    static void scales(in_256::block_scales & to, const weight_rows & rows) {
        words last[4];
        rows.turned(94, last);                                                              // the last 16 bytes
        const auto shifted = [&](uint32_t i) { return last[i] >> 16 | last[i + 1] << 16; }; // past two of them
        const words high = shifted(2);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const words low = moved(shifted(static_cast<uint32_t>(i % 2)), i < 2 ? 0 : -4, 0x0f);
            to.integers[i] = less_32(joined_bits(low, high, 4 - 2 * i, 0x30));
        }
        to.scale = low_halves(last[3] >> 16);
    }
    template <class F> static void numbers(const weight_rows & rows, F to) {
        words bits[8];
        rows.turned(0, bits);
        rows.turned(16, bits + 4);
        unpack_two_bits(rows, 32, [&](uint32_t first, const words(&two)[4]) __attribute__((always_inline)) {
            words four[4];
            for (uint32_t j = 0; j < 4; ++j) {
                four[j] = joined_bits(two[j], bits[first % 8 + j], 2 - static_cast<int>(first / 8), 0x04);
            }
            to(first, four);
        });
    }
};

// An F16, 8 scales of 6 bits (two bytes of upper bits, four of lower), 256 numbers of 4 bits that stand for others: (scale - 32) * number
struct iq4_xs_weights {
    static constexpr size_t BYTES = 136;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool SIGNED = true;
    static constexpr bool MINIMA = false;

    static void scales(in_256::block_scales & to, const weight_rows & rows) {
        const words first = rows.word(0);
        const words low = rows.word(4);
        to.scale = low_halves(first);
        for (uint32_t i = 0; i < 2; ++i) {
            words four = {};
            for (uint32_t j = 0; j < 4; ++j) {
                const words both = (low >> (16 * i + 4 * j) & 0x0f) | (first >> (16 + 8 * i + 2 * j) & 0x03) << 4;
                four |= both << (8 * j);
            }
            to.integers[i] = less_32(four);
        }
    }
    template <class F> static void numbers(const weight_rows & rows, F to) {
#pragma GCC unroll 8
        for (uint32_t i = 0; i < 8; ++i) {
            words low[4];
            words high[4];
            rows.turned(8 + i * 16, low);
            for (uint32_t j = 0; j < 4; ++j) {
                high[j] = looked_up(FOUR_BITS, moved(low[j], -4, 0x0f));
                low[j] = looked_up(FOUR_BITS, moved(low[j], 0, 0x0f));
            }
            to(i * 8, low);
            to(i * 8 + 4, high);
        }
    }
};

// 256 numbers of 2 bits, an F16: 0, 1 and 2 stand for -1, 0 and 1.
struct tq2_0_weights {
    static constexpr size_t BYTES = 66;
    static constexpr uint32_t PER_SCALE = in_256::BLOCK;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 3;
    static constexpr uint32_t OFFSET_BITS = 0;
    static constexpr bool MINIMA = false;

    static void scales(in_256::block_scales & to, const weight_rows & rows) { to.scale = rows.halves(64); }
    template <class F> static void numbers(const weight_rows & rows, F to) { unpack_two_bits(rows, 0, to); }
};

// 5 numbers in each of 48 bytes, 4 in each of 4, an F16. Bytes are fractions of 256, and numbers their digits to the base of 3, as in TQ2_0.
struct tq1_0_weights {
    static constexpr size_t BYTES = 54;
    static constexpr uint32_t PER_SCALE = in_256::BLOCK;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 2;
    static constexpr uint32_t OFFSET_BITS = 0;
    static constexpr bool MINIMA = false;

    static void scales(in_256::block_scales & to, const weight_rows & rows) { to.scale = rows.halves(52); }
    template <class F> static void numbers(const weight_rows & rows, F to) {
#pragma GCC unroll 3
        for (uint32_t i = 0; i < 3; ++i) {
            words fractions[4];
            rows.turned(i * 16, fractions);
#pragma GCC unroll 5
            for (uint32_t digit = 0; digit < 5; ++digit) {
                words four[4];
                for (uint32_t j = 0; j < 4; ++j) {
                    four[j] = next_digit(fractions[j]);
                }
                to(i < 2 ? digit * 8 + i * 4 : 40 + digit * 4, four);
            }
        }
        words last = rows.word(48);
        words four[4];
        for (words & digit : four) {
            digit = next_digit(last);
        }
        to(60, four);
    }

private:
    // The whole part of three times a fraction, which then has what is left.
    static words next_digit(words & fraction) {
        const auto of_256 = reinterpret_cast<unsigned_bytes>(fraction);
        const auto one = reinterpret_cast<words>(of_256 >= 86);
        const auto two = reinterpret_cast<words>(of_256 >= 171);
        fraction = reinterpret_cast<words>(of_256 + of_256 + of_256);
        return (one & all_bytes(1)) + (two & all_bytes(1));
    }
};

} // namespace

} // namespace kvg::KVG_PRODUCTS
