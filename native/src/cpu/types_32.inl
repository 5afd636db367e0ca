// Types in blocks of 32. Included behind tiles_32.inl.

namespace kvg::KVG_PRODUCTS {

namespace {

using in_32::block_numbers;
using in_32::block_scales;

// scale * (byte - offset)
inline block_scales lowered(floats scale, float offset) { return {scale, scale * -offset}; }
inline block_scales scales_alone(floats scale) { return {scale, floats{}}; }

// Numbers of 4 bits: the lower halves of the 16 bytes at `offset` are numbers 0 to 15, the upper ones are the rest.
inline block_numbers nibbles(const weight_rows & rows, size_t offset) {
    block_numbers numbers;
    rows.turned(offset, numbers.at);
    for (uint32_t i = 0; i < 4; ++i) {
        numbers.at[i + 4] = moved(numbers.at[i], -4, 0x0f);
        numbers.at[i] = moved(numbers.at[i], 0, 0x0f);
    }
    return numbers;
}

// Adds 16 to number i where bit i of the word at `offset` is set.
inline block_numbers with_fifth_bits(block_numbers numbers, const weight_rows & rows, size_t offset) {
    const words bits = rows.word(offset);
    for (uint32_t i = 0; i < 4; ++i) {
        const words eight = repeated(bits, i);
        numbers.at[2 * i] |= where_bits(eight, 0x08040201) & all_bytes(0x10);
        numbers.at[2 * i + 1] |= where_bits(eight, 0x80402010) & all_bytes(0x10);
    }
    return numbers;
}

inline block_numbers looked_up(const int8_t * table, block_numbers numbers) {
    for (words & four : numbers.at) {
        four = looked_up(table, four);
    }
    return numbers;
}

// An F16, 32 signed bytes
struct q8_0_weights {
    static constexpr size_t BYTES = 34;
    static constexpr bool HALVES = false;
    static constexpr bool SIGNED = true;

    static block_numbers numbers(const weight_rows & rows) {
        block_numbers numbers;
        rows.turned(2, numbers.at);
        rows.turned(18, numbers.at + 4);
        return numbers;
    }
    static block_scales scales(const weight_rows & rows) { return scales_alone(rows.halves(0)); }
};

// An F16, 32 numbers of 4 bits: scale * (number - 8)
struct q4_0_weights {
    static constexpr size_t BYTES = 18;
    static constexpr bool HALVES = false;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 15;

    static block_numbers numbers(const weight_rows & rows) { return nibbles(rows, 2); }
    static block_scales scales(const weight_rows & rows) { return lowered(rows.halves(0), 8); }
};

// Two F16, 32 numbers of 4 bits: scale * number + minimum
struct q4_1_weights {
    static constexpr size_t BYTES = 20;
    static constexpr bool HALVES = false;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 15;

    static block_numbers numbers(const weight_rows & rows) { return nibbles(rows, 4); }
    static block_scales scales(const weight_rows & rows) {
        const words both = rows.word(0);
        return {low_halves(both), low_halves(both >> 16)};
    }
};

// An F16, 32 bits, 32 numbers of 4 bits: scale * (number + 16 * bit - 16)
struct q5_0_weights {
    static constexpr size_t BYTES = 22;
    static constexpr bool HALVES = false;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 31;

    static block_numbers numbers(const weight_rows & rows) { return with_fifth_bits(nibbles(rows, 6), rows, 2); }
    static block_scales scales(const weight_rows & rows) { return lowered(rows.halves(0), 16); }
};

// Two F16, 32 bits, 32 numbers of 4 bits: scale * (number + 16 * bit) + minimum
struct q5_1_weights {
    static constexpr size_t BYTES = 24;
    static constexpr bool HALVES = false;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 31;

    static block_numbers numbers(const weight_rows & rows) { return with_fifth_bits(nibbles(rows, 8), rows, 4); }
    static block_scales scales(const weight_rows & rows) { return q4_1_weights::scales(rows); }
};

// What 4 bits stand for in IQ4_NL and IQ4_XS.
constexpr int8_t FOUR_BITS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// An F16, 32 numbers of 4 bits that stand for others
struct iq4_nl_weights {
    static constexpr size_t BYTES = 18;
    static constexpr bool HALVES = false;
    static constexpr bool SIGNED = true;

    static block_numbers numbers(const weight_rows & rows) { return looked_up(FOUR_BITS, nibbles(rows, 2)); }
    static block_scales scales(const weight_rows & rows) { return scales_alone(rows.halves(0)); }
};

// A power of two, 32 floats of 4 bits: a sign, two bits of exponent, one of mantissa. Bytes are 2 times the float, raised by 12.
struct mxfp4_weights {
    static constexpr size_t BYTES = 17;
    static constexpr bool HALVES = false;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 24;

    static block_numbers numbers(const weight_rows & rows) {
        static constexpr int8_t FLOATS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        return looked_up(FLOATS, nibbles(rows, 1));
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

    static block_numbers numbers(const weight_rows & rows, uint32_t half) {
        static constexpr int8_t FLOATS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        words both[4];
        rows.turned(4 + half * 16, both);
        block_numbers numbers;
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t first = i / 2 * 4 + i % 2;
            numbers.at[first] = moved(both[i], 0, 0x0f);
            numbers.at[first + 2] = moved(both[i], -4, 0x0f);
        }
        return looked_up(FLOATS, numbers);
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
