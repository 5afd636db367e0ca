// Products of weights in blocks of 32, by AVX-512 VNNI.
//
// A type of weights is a struct W with
//   BYTES              of a block
//   FORM               what a number is
//   numbers(rows)      of a block of 16 rows: unsigned bytes
//   scales(rows)       what it has beside them
// With HALVES two blocks are packed together, and numbers(rows, i) and scales(rows, i) are of the first or the second.
// If it is RAISED, an F16 and 16 bytes of 4 bits, OF_NIBBLES<W> may be true. It has then
//   low(v), high(v)    numbers of the lower or the upper halves of bytes, as numbers() has them
//   factor()           of the scales
#include "cpu/rounded_rows.h"
#include "cpu/vnni.inl"

namespace kvg::products_vnni {

namespace {

constexpr uint32_t BLOCK = rounded_32::N;
constexpr uint32_t CHUNK = 512; // weights of a row at a time: unpacked they stay in L1

enum form {
    RAISED,  // scale * (byte - 128)
    MINIMUM, // scale * byte + minimum
    HALVES,  // scale * (byte - 128) with one scale for 16 numbers, and one for the other 16
};

// A block of 16 rows of weights: a lane is a row. Vector j has numbers 4j to 4j + 3.
struct block_numbers {
    __m512i at[BLOCK / 4];
};

struct block_scales {
    __m512 scales;
    __m512 others; // minima, or scales of the second halves
};

struct tile {
    block_numbers numbers[CHUNK / BLOCK];
    block_scales scales[CHUNK / BLOCK];
};

// Blocks of 16 rows of weights.
template <class W> struct piece {
    weight_rows rows;
    uint32_t first;
    uint32_t n_blocks;

    block_numbers numbers(uint32_t b) const {
        constexpr uint32_t blocks_of_line = W::BYTES > 32 ? 1 : 64 / W::BYTES;
        if (b % blocks_of_line == 0) {
            rows.fetch_behind<1>((first + b) * W::BYTES);
        }
        if constexpr (W::FORM == HALVES) {
            return W::numbers(pair(b), b % 2);
        } else {
            return W::numbers(rows.from((first + b) * W::BYTES));
        }
    }
    block_scales scales(uint32_t b) const {
        if constexpr (W::FORM == HALVES) {
            return W::scales(pair(b), b % 2);
        } else {
            return W::scales(rows.from((first + b) * W::BYTES));
        }
    }

private:
    weight_rows pair(uint32_t b) const { return rows.from((first + b) / 2 * 2 * W::BYTES); }
};

// Rounded rows, from some block on.
struct rounded_rows {
    const uint8_t * numbers;
    const uint8_t * blocks;
    size_t stride;

    rounded_rows from(uint32_t row) const { return {numbers + row * stride, blocks + row * stride, stride}; }
    const uint8_t * at(uint32_t row, uint32_t b) const { return numbers + row * stride + b * BLOCK; }
    const uint8_t * block(uint32_t row, uint32_t b) const { return blocks + row * stride + b * sizeof(rounded_32); }
};

// N rows' sums go on by a block. Here alone floats are added.
template <form FORM, uint32_t N>
inline void add_block(__m512 * sum, const block_numbers & numbers, const block_scales & weights, const rounded_rows & x,
                      uint32_t b) {
    constexpr uint32_t PARTS = FORM == HALVES ? 2 : 1;
    __m512i products[N][PARTS];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < N; ++r) {
        const auto lift = [&](size_t of) { return load<int32_t>(x.block(r, b) + of); };
        const int32_t half = PARTS == 2 ? lift(offsetof(rounded_32, lift_of_half)) : 0;
        products[r][0] = _mm512_set1_epi32(half);
        products[r][PARTS - 1] = _mm512_set1_epi32(FORM == MINIMUM ? 0 : lift(offsetof(rounded_32, lift)) - half);
    }
#pragma GCC unroll 8
    for (uint32_t j = 0; j < BLOCK / 4; ++j) {
#pragma GCC unroll 8
        for (uint32_t r = 0; r < N; ++r) {
            const __m512i four = _mm512_set1_epi32(load<int32_t>(x.at(r, b) + j * 4));
            __m512i & of_part = products[r][j * PARTS / (BLOCK / 4)];
            of_part = _mm512_dpbusd_epi32(of_part, numbers.at[j], four);
        }
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < N; ++r) {
        const uint8_t * block = x.block(r, b);
        if constexpr (FORM == MINIMUM) {
            sum[r] = _mm512_fmadd_ps(weights.others, _mm512_set1_ps(load<float>(block + offsetof(rounded_32, total))), sum[r]);
        }
        const __m512 scale = _mm512_set1_ps(load<float>(block + offsetof(rounded_32, scale)));
#pragma GCC unroll 2
        for (uint32_t i = 0; i < PARTS; ++i) {
            const __m512 both = _mm512_mul_ps(i == 0 ? weights.scales : weights.others, scale);
            sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[r][i]), both, sum[r]);
        }
    }
}

// N rows; numbers_of(b) and scales_of(b) tell what the weights have in block b.
template <form FORM, uint32_t N, class F, class G>
inline void multiply(uint32_t n_blocks, F numbers_of, G scales_of, const rounded_rows & x, sums * out) {
    __m512 sum[N];
    for (uint32_t r = 0; r < N; ++r) {
        sum[r] = _mm512_load_ps(out[r]);
    }
    for (uint32_t b = 0; b < n_blocks; ++b) {
        add_block<FORM, N>(sum, numbers_of(b), scales_of(b), x, b);
    }
    for (uint32_t r = 0; r < N; ++r) {
        _mm512_store_ps(out[r], sum[r]);
    }
}

template <class W> constexpr bool OF_NIBBLES = false;

// One row with blocks of an F16 and 16 bytes. Of a block alone, F16 would be collected from 16 rows one by one. But two blocks are 9 words of
// 32 bits, and 8 are 36, which are turned four at a time with the rest. A block's bytes begin in the middle of a word: number i is in the
// first half of byte i, number 16 + i in the other.
template <class W> class nibble_pairs {
public:
    nibble_pairs(const piece<W> & weights, const rounded_rows & x) : weights_(weights), x_(x) {}

    // `sum` goes on by 8 blocks from b on.
    [[gnu::always_inline]] __m512 multiply(uint32_t b, __m512 sum) {
        const size_t offset = (weights_.first + b) * W::BYTES;
        const weight_rows rows = weights_.rows.from(offset);
#pragma GCC unroll 9
        for (uint32_t k = 0; k < 9; ++k) {
            if (k % 4 == 0) {
                weights_.rows.template fetch_behind<1>(offset + k * 16);
            }
            __m512i words[4];
            rows.words(k * 16, words);
#pragma GCC unroll 4
            for (uint32_t i = 0; i < 4; ++i) {
                const uint32_t word = 4 * k + i;
                sum = add_word(word % 9, b + word / 9 * 2, words[i], sum);
            }
        }
        return sum;
    }

private:
    // Word `i` of blocks b and b + 1
    [[gnu::always_inline]] __m512 add_word(uint32_t i, uint32_t b, __m512i word, __m512 sum) {
        const uint8_t * x = x_.at(0, b + i / 5);
        const auto four = [](const uint8_t * from) { return _mm512_set1_epi32(load<int32_t>(from)); };
        if (i == 0) { // scale, bytes 0 and 1
            first_ = word;
            products_[0] = lift(b);
            products_[1] = lift(b + 1);
        } else if (i < 4) {
            add(0, word, four(x + 4 * i - 2), four(x + 4 * i + 14));
        } else if (i == 4) { // bytes 14 and 15, the next scale
            const __m512i low = _mm512_set1_epi32(0xffff);
            const auto ends = [&](const uint8_t * from) { // numbers of bytes 14, 15, 0 and 1
                return _mm512_set1_epi32(load<uint16_t>(from + 14) | load<uint16_t>(from) << 16);
            };
            scales_ = _mm512_ternarylogic_epi32(low, first_, word, 0xca);
            add(0, _mm512_ternarylogic_epi32(low, word, first_, 0xca), ends(x), ends(x + 16));
        } else {
            add(1, word, four(x + 4 * (i - 5)), four(x + 4 * (i - 5) + 16));
        }
        if (i == 8) {
            sum = scaled(0, b, low_halves(scales_), sum);
            sum = scaled(1, b + 1, high_halves(scales_), sum);
        }
        return sum;
    }
    __m512i lift(uint32_t b) const { return _mm512_set1_epi32(load<int32_t>(x_.block(0, b) + offsetof(rounded_32, lift))); }
    [[gnu::always_inline]] void add(uint32_t block, __m512i word, __m512i x_of_low, __m512i x_of_high) {
        products_[block] = _mm512_dpbusd_epi32(products_[block], W::low(word), x_of_low);
        products_[block] = _mm512_dpbusd_epi32(products_[block], W::high(word), x_of_high);
    }
    [[gnu::always_inline]] __m512 scaled(uint32_t block, uint32_t b, __m512 scales, __m512 sum) const {
        const __m512 scale = _mm512_set1_ps(load<float>(x_.block(0, b) + offsetof(rounded_32, scale)));
        const __m512 both = _mm512_mul_ps(_mm512_mul_ps(scales, W::factor()), scale);
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(products_[block]), both, sum);
    }

    const piece<W> & weights_;
    const rounded_rows & x_;
    __m512i products_[2];
    __m512i first_;
    __m512i scales_;
};

// One row. Blocks that are left over go one by one.
template <class W> void multiply_one(const piece<W> & weights, const rounded_rows & x, sums * out) {
    uint32_t b = 0;
    if constexpr (OF_NIBBLES<W>) {
        nibble_pairs<W> pairs(weights, x);
        __m512 sum = _mm512_load_ps(out[0]);
        for (; b + 8 <= weights.n_blocks; b += 8) {
            sum = pairs.multiply(b, sum);
        }
        _mm512_store_ps(out[0], sum);
    }
    const piece<W> rest = {weights.rows, weights.first + b, weights.n_blocks - b};
    const auto numbers_of = [&](uint32_t i) { return rest.numbers(i); };
    const auto scales_of = [&](uint32_t i) { return rest.scales(i); };
    multiply<W::FORM, 1>(rest.n_blocks, numbers_of, scales_of, {x.at(0, b), x.block(0, b), x.stride}, out);
}

template <class W> void unpack(tile & to, const piece<W> & from) {
    for (uint32_t b = 0; b < from.n_blocks; ++b) {
        to.numbers[b] = from.numbers(b);
        to.scales[b] = from.scales(b);
    }
}

template <form FORM, uint32_t N>
void multiply_tile(const tile & weights, uint32_t n_blocks, const rounded_rows & x, sums * out) {
    const auto numbers_of = [&](uint32_t b) -> const block_numbers & { return weights.numbers[b]; };
    const auto scales_of = [&](uint32_t b) -> const block_scales & { return weights.scales[b]; };
    multiply<FORM, N>(n_blocks, numbers_of, scales_of, x, out);
}

template <class W>
void multiply_piece(tile & scratch, const piece<W> & weights, const rounded_rows & x, uint32_t n_rows, sums * out) {
    if (n_rows == 1) {
        return multiply_one(weights, x, out);
    }
    unpack(scratch, weights);
    by_eights(n_rows, [&](auto n, uint32_t r) { multiply_tile<W::FORM, n>(scratch, weights.n_blocks, x.from(r), out + r); });
}

template <class W> void run(const product_job & job, uint32_t begin, uint32_t end) {
    tile scratch;
    const size_t stride = row_bytes<rounded_32>(job.n_in);
    run_tiles<weight_rows>(job, begin, end, stride,
                           [&](const weight_rows & weights, const uint8_t * rows, uint32_t n, sums * out) {
                               for (uint32_t in = 0; in < job.n_in; in += CHUNK) {
                                   const uint32_t b = in / BLOCK;
                                   const uint32_t n_blocks = (job.n_in - in < CHUNK ? job.n_in - in : CHUNK) / BLOCK;
                                   const uint8_t * blocks = rows + job.n_in + b * sizeof(rounded_32);
                                   multiply_piece<W>(scratch, {weights, b, n_blocks}, {rows + in, blocks, stride}, n, out);
                               }
                           });
}

} // namespace

} // namespace kvg::products_vnni
