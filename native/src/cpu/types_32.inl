// Types in blocks of 32. Included behind tiles_32.inl.

namespace kvg::KVG_PRODUCTS {

namespace {

using in_32::block_scales;

// scale * (byte - offset)
inline block_scales lowered(floats scale, float offset) { return {scale, scale * -offset}; }
inline block_scales scales_alone(floats scale) { return {scale, floats{}}; }

// Numbers of 4 bits: the lower halves of the 16 bytes at `offset` are numbers 0 to 15, the upper ones are the rest.
template <class F> [[gnu::always_inline]] inline void nibbles(const weight_rows & rows, size_t offset, F to) {
    words both[4];
    rows.turned(offset, both);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) {
        to(i, moved(both[i], 0, 0x0f));
        to(i + 4, moved(both[i], -4, 0x0f));
    }
}

// With 16 more where bit i of the word at `fifth` is set, of number i.
template <class F> [[gnu::always_inline]] inline void five_bits(const weight_rows & rows, size_t offset, size_t fifth, F to) {
    const words upper = rows.word(fifth); // of each byte bits 4 to 7 are the fifth of four numbers
    const words lower = upper << 4;
    nibbles(rows, offset, [&](uint32_t j, words four) __attribute__((always_inline)) {
        const words bits = repeated(j % 2 == 0 ? lower : upper, j / 2) & 0x80402010;
        to(j, four | least_bytes(bits, all_bytes(0x10)));
    });
}

// What nibbles stand for
template <class F>
[[gnu::always_inline]] inline void looked_up_nibbles(const int8_t * table, const weight_rows & rows, size_t offset, F to) {
    nibbles(rows, offset, [&](uint32_t j, words four) __attribute__((always_inline)) { to(j, looked_up(table, four)); });
}

// An F16, 32 signed bytes
struct q8_0_weights {
    static constexpr size_t BYTES = 34;
    static constexpr bool HALVES = false;
    static constexpr bool SIGNED = true;

    template <class F> static void numbers(const weight_rows & rows, F to) {
#pragma GCC unroll 2
        for (uint32_t half = 0; half < 2; ++half) {
            words four[4];
            rows.turned(2 + half * 16, four);
#pragma GCC unroll 4
            for (uint32_t j = 0; j < 4; ++j) {
                to(half * 4 + j, four[j]);
            }
        }
    }
    static block_scales scales(const weight_rows & rows) { return scales_alone(rows.halves(0)); }
};

// An F16, 32 numbers of 4 bits: scale * (number - 8)
struct q4_0_weights {
    static constexpr size_t BYTES = 18;
    static constexpr bool HALVES = false;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 15;

    template <class F> static void numbers(const weight_rows & rows, F to) { nibbles(rows, 2, to); }
    static block_scales scales(const weight_rows & rows) { return lowered(rows.halves(0), 8); }
};

// Two F16, 32 numbers of 4 bits: scale * number + minimum
struct q4_1_weights {
    static constexpr size_t BYTES = 20;
    static constexpr bool HALVES = false;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 15;

    template <class F> static void numbers(const weight_rows & rows, F to) { nibbles(rows, 4, to); }
    static block_scales scales(const weight_rows & rows) {
        block_scales scales;
        both_halves(rows.word(0), scales.scale, scales.other);
        return scales;
    }
};

// An F16, 32 bits, 32 numbers of 4 bits: scale * (number + 16 * bit - 16)
struct q5_0_weights {
    static constexpr size_t BYTES = 22;
    static constexpr bool HALVES = false;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 31;

    template <class F> static void numbers(const weight_rows & rows, F to) { five_bits(rows, 6, 2, to); }
    static block_scales scales(const weight_rows & rows) { return lowered(rows.halves(0), 16); }
};

// Two F16, 32 bits, 32 numbers of 4 bits: scale * (number + 16 * bit) + minimum
struct q5_1_weights {
    static constexpr size_t BYTES = 24;
    static constexpr bool HALVES = false;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 31;

    template <class F> static void numbers(const weight_rows & rows, F to) { five_bits(rows, 8, 4, to); }
    static block_scales scales(const weight_rows & rows) { return q4_1_weights::scales(rows); }
};

// What 4 bits stand for in IQ4_NL and IQ4_XS.
constexpr int8_t FOUR_BITS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// An F16, 32 numbers of 4 bits that stand for others
struct iq4_nl_weights {
    static constexpr size_t BYTES = 18;
    static constexpr bool HALVES = false;
    static constexpr bool SIGNED = true;

    template <class F> static void numbers(const weight_rows & rows, F to) { looked_up_nibbles(FOUR_BITS, rows, 2, to); }
    static block_scales scales(const weight_rows & rows) { return scales_alone(rows.halves(0)); }
};

// A power of two, 32 floats of 4 bits: a sign, two bits of exponent, one of mantissa. Bytes are 2 times the float, raised by 12.
struct mxfp4_weights {
    static constexpr size_t BYTES = 17;
    static constexpr bool HALVES = false;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 24;

    template <class F> static void numbers(const weight_rows & rows, F to) {
        static constexpr int8_t FLOATS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        looked_up_nibbles(FLOATS, rows, 1, to);
    }
    static block_scales scales(const weight_rows & rows) {
        // 2^(exponent - 127): a float has these bits, except that of 0
        const words exponents = rows.byte(0);
        const words power = exponents == 0 ? all(0x00400000u) : exponents << 23;
        return lowered(as_floats(power) * 0.5f, 12);
    }
};

// Four scales, each a float of 7 bits, 4 of them exponent; 64 floats of 4 bits, of which 8 bytes have 16. This is a pair of blocks. Bytes
// are 2 times the float.
struct nvfp4_weights {
    static constexpr size_t BYTES = 18;
    static constexpr bool HALVES = true;
    static constexpr bool SIGNED = true;

    template <class F> static void numbers(const weight_rows & rows, uint32_t half, F to) {
        static constexpr int8_t FLOATS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        words both[4];
        rows.turned(4 + half * 16, both);
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t first = i / 2 * 4 + i % 2;
            to(first, looked_up(FLOATS, moved(both[i], 0, 0x0f)));
            to(first + 2, looked_up(FLOATS, moved(both[i], -4, 0x0f)));
        }
    }
    static block_scales scales(const weight_rows & rows, uint32_t half) {
        return {float_of(rows.byte(half * 2)), float_of(rows.byte(half * 2 + 1))};
    }

private:
    // Half a scale. 127 stands for 0; the eighth bit for nothing.
    static floats float_of(words scales) {
        const words bits = scales & 0x7f;
        const words normal = (bits << 20) + ((127 - 7 - 1) << 23);
        const floats small = __builtin_convertvector(as_ints(bits), floats) * 0x1p-10f;
        const words either = bits < 8 ? reinterpret_cast<words>(small) : normal;
        return as_floats(scales == 127 ? all(0u) : either);
    }
};

} // namespace

} // namespace kvg::KVG_PRODUCTS
