// Vectors of NEON with its dot product of signed bytes, for products: sums are of 32 bits from the beginning.
#include <arm_neon.h>

#define LANES 4
#include "cpu/lanes.inl"

namespace kvg::KVG_PRODUCTS {

namespace {

inline uint8x16_t raw_bytes(words v) { return reinterpret_cast<uint8x16_t>(v); }

inline floats fused(floats a, floats b, floats c) { return vfmaq_f32(c, a, b); }
// half(i): the one of lane i
template <class F> inline floats of_halves(F half) {
    const int16x4_t all = {half(0), half(1), half(2), half(3)};
    return vcvt_f32_f16(vreinterpret_f16_s16(all));
}
inline floats low_halves(words lanes) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(reinterpret_cast<uint32x4_t>(lanes))));
}
// The lower and the upper halves of all lanes
inline void both_halves(words lanes, floats & low, floats & high) {
    low = low_halves(lanes);
    high = low_halves(lanes >> 16);
}
inline float through_half(float x) { return static_cast<float>(static_cast<__fp16>(x)); }
inline ints rounded(floats x) { return vcvtnq_s32_f32(x); }

// Whether any lane is true.
inline bool any(ints lanes) { return vmaxvq_u32(reinterpret_cast<uint32x4_t>(lanes)) != 0; }
inline int32_t sum_of(ints v) { return vaddvq_s32(v); }
// None may be NaN.
inline float greatest_of(floats v) { return vmaxvq_f32(v); }
// Integers that are bytes, one behind the other
inline void store_bytes(uint8_t * to, ints v) {
    typedef int8_t quarter __attribute__((vector_size(LANES)));
    store(to, __builtin_convertvector(v, quarter));
}

// Of each row 16 bytes: word i of all rows is vector i.
inline void turn(const sixteen * rows, words * four) {
    const auto low_of = [&](int i) { return vreinterpretq_u64_u32(vzip1q_u32(rows[i], rows[i + 1])); };
    const auto high_of = [&](int i) { return vreinterpretq_u64_u32(vzip2q_u32(rows[i], rows[i + 1])); };
    const uint64x2_t low[2] = {low_of(0), low_of(2)};
    const uint64x2_t high[2] = {high_of(0), high_of(2)};
    four[0] = reinterpret_cast<words>(vzip1q_u64(low[0], low[1]));
    four[1] = reinterpret_cast<words>(vzip2q_u64(low[0], low[1]));
    four[2] = reinterpret_cast<words>(vzip1q_u64(high[0], high[1]));
    four[3] = reinterpret_cast<words>(vzip2q_u64(high[0], high[1]));
}

// The bytes of a table at indices from 0 to 15
inline words looked_up(const int8_t * table, words indices) {
    return reinterpret_cast<words>(vqtbl1q_s8(vld1q_s8(table), raw_bytes(indices)));
}

// Byte i of each lane, four times
inline words repeated(words lanes, uint32_t i) {
    const words first = {0, 0x04040404, 0x08080808, 0x0c0c0c0c};
    return reinterpret_cast<words>(vqtbl1q_u8(raw_bytes(lanes), raw_bytes(first + 0x01010101 * i)));
}

inline ints signed_byte(words lanes, uint32_t i) { return as_ints(lanes << (24 - 8 * i)) >> 24; }

typedef ints factors; // integers that sums are multiplied by

// Byte i of each lane, which has a sign
inline factors factors_of(words lanes, uint32_t i) { return signed_byte(lanes, i); }
inline factors once() { return all(1); }

// Two integers of each lane
struct pairs {
    ints first;
    ints second;
};

// Bytes 2i and 2i + 1 of each lane, which have signs, times 2 to the power of `bits`
inline pairs pairs_of(words lanes, uint32_t i, uint32_t bits) {
    return {signed_byte(lanes, 2 * i) << bits, signed_byte(lanes, 2 * i + 1) << bits};
}
// Each first, and each second integer is multiplied by one of two numbers.
inline ints times(const pairs & integers, const int16_t * two) {
    return integers.first * all(int32_t{two[0]}) + integers.second * all(int32_t{two[1]});
}

// How bytes of weights are multiplied by a row's: all as if they had signs, as none without them is above 127
struct dot_form {
    static constexpr bool TWO_ROWS = false;
    static constexpr uint32_t MOST_ROWS = 4;   // at a time: of registers there are 32
    static constexpr uint32_t MOST_GROUPS = 4; // of LANES rows of weights
    static constexpr bool RAISED = false;      // by 128
    typedef words stored;
    typedef ints sum;

    // Vectors of bytes whose products fit into a sum
    static constexpr uint32_t vectors(uint32_t) { return 64; }
    static stored store(words bytes) { return bytes; }
    // x: four numbers of a row, in each lane
    static void add_products(sum & to, const stored & weights, words x) {
        to = vdotq_s32(to, reinterpret_cast<int8x16_t>(weights), reinterpret_cast<int8x16_t>(x));
    }
    static ints scaled(const sum & of, factors by) { return of * by; }
};

template <class W> using form_of_one = dot_form;
#ifdef __ARM_FEATURE_MATMUL_INT8
// Two rows together, 8 numbers at a time: an instruction multiplies two times 8 bytes with two times 8.
struct matrix_form : dot_form {
    static constexpr bool TWO_ROWS = true;
    struct eights {      // of rows of weights
        int8x16_t first; // 0 and 1
        int8x16_t last;  // 2 and 3
    };
    struct square { // of each row of weights a sum with one row, and one with the other
        int32x4_t first;
        int32x4_t last;
    };

    using dot_form::add_products;
    static eights together(words a, words b) {
        return {vreinterpretq_s8_u32(vzip1q_u32(a, b)), vreinterpretq_s8_u32(vzip2q_u32(a, b))};
    }
    static void add_products(square & to, const eights & weights, uint64_t row, uint64_t other) {
        const int8x16_t two = vcombine_s8(vcreate_s8(row), vcreate_s8(other));
        to.first = vmmlaq_s32(to.first, weights.first, two);
        to.last = vmmlaq_s32(to.last, weights.last, two);
    }
    static void add_square(sum & row, sum & other, const square & both) {
        row += vuzp1q_s32(both.first, both.last);
        other += vuzp2q_s32(both.first, both.last);
    }
};

template <class W> using form_of_many = matrix_form;
#else
template <class W> using form_of_many = dot_form;
#endif

} // namespace

} // namespace kvg::KVG_PRODUCTS
