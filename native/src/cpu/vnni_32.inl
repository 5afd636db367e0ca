// Products of weights in blocks of 32, by AVX-512 VNNI.
//
// A type of weights is a struct W with
//   BYTES              of a block
//   FORM               what a number is
//   numbers(rows)      of a block of 16 rows: unsigned bytes
//   scales(rows)       what it has beside them
// With HALVES two blocks are packed together, and numbers(rows, i) and scales(rows, i) are of the first or the second.
//
// One row alone is multiplied in one of three ways, whichever is the fastest. A type may have
//   head               what set(rows) takes out of a block of 16 rows beside its numbers, with `scales`
//   products(rows, offset, x, head)   of a block of 16 rows that is at this offset of them with one row's 32 bytes
// or, if it is RAISED, a scale and 16 bytes of 4 bits, OF_NIBBLES<W> may be true. It has then
//   low(v), high(v)    numbers of the lower or the upper halves of bytes, as numbers() has them
//   scales_of(v, i)    scale i of those that are in a word
#include "cpu/rounded_rows.h"
#include "cpu/vnni.inl"

#include <type_traits>

namespace kvg::products_vnni {

namespace {

constexpr uint32_t BLOCK = rounded_32::N;
constexpr uint32_t CHUNK = 512; // weights of a row at a time, at most: unpacked they stay in L1

enum form {
    RAISED,  // scale * (byte - 128)
    MINIMUM, // scale * byte + minimum; bytes are below 128, as AMX takes them for signed ones
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

// Products of a block of 16 rows with one row: the sum of each 128 bits is that of a row. Vector i has rows i, i + 4, i + 8 and i + 12.
struct four_sums {
    __m512i of[4];
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

    weight_rows block(uint32_t b) const { return rows.from((first + b) * W::BYTES); }
    // Each 64 bytes once
    [[gnu::always_inline]] void fetch(uint32_t b) const {
        const size_t offset = (first + b) * W::BYTES;
        if (offset % 64 < W::BYTES) {
            rows.fetch_behind<1>(offset / 64 * 64);
        }
    }
    block_numbers numbers(uint32_t b) const {
        fetch(b);
        if constexpr (W::FORM == HALVES) {
            return W::numbers(pair(b), b % 2);
        } else {
            return W::numbers(block(b));
        }
    }
    block_scales scales(uint32_t b) const {
        if constexpr (W::FORM == HALVES) {
            return W::scales(pair(b), b % 2);
        } else {
            return W::scales(block(b));
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

// A row's sum goes on by its products with a block. All kernels add floats here, so that they give the same bits.
template <form FORM>
[[gnu::always_inline]] inline __m512 with_products(__m512 sum, __m512 products, const block_scales & scales,
                                                   const uint8_t * block) {
    if constexpr (FORM == MINIMUM) {
        sum = _mm512_fmadd_ps(scales.others, _mm512_set1_ps(load<float>(block + offsetof(rounded_32, total))), sum);
    }
    const __m512 scale = _mm512_set1_ps(load<float>(block + offsetof(rounded_32, scale)));
    return _mm512_fmadd_ps(products, _mm512_mul_ps(scales.scales, scale), sum);
}

// N rows' sums go on by a block.
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
        sum[r] = with_products<FORM>(sum[r], _mm512_cvtepi32_ps(products[r][0]), weights, block);
        if constexpr (FORM == HALVES) {
            sum[r] = with_products<FORM>(sum[r], _mm512_cvtepi32_ps(products[r][1]), {weights.others, weights.others}, block);
        }
    }
}

// A row's sum goes on by a block of which all products are there.
template <form FORM>
inline __m512 with_block(__m512 sum, const four_sums & products, const block_scales & scales, const uint8_t * block) {
    __m512i integers = sums_of_fours(products.of);
    if constexpr (FORM != MINIMUM) {
        integers = _mm512_add_epi32(integers, _mm512_set1_epi32(load<int32_t>(block + offsetof(rounded_32, lift))));
    }
    return with_products<FORM>(sum, _mm512_cvtepi32_ps(integers), scales, block);
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

// One row. Its products with a block are added before a lane is a row: that takes fewer instructions than turning the numbers first. Each
// step of a block waits for the one before, and a CPU looks ahead by about a block. So three blocks are in work: one at its head, one at
// its products, one at their sums. A function of its own, which has all registers.
template <class W> [[gnu::noinline]] void multiply_as_it_lies(const piece<W> weights, const rounded_rows x, sums * out) {
    __m512 sum = _mm512_load_ps(out[0]);
    typename W::head heads[2];
    four_sums before;
    block_scales scales_before;
    weight_rows rows = weights.block(0);
    const uint8_t * numbers = x.numbers;
    const uint8_t * blocks = x.blocks;
    heads[0].set(rows);
    for (uint32_t b = 0; b < weights.n_blocks; ++b) {
        weights.fetch(b);
        rows.advance(W::BYTES);
        if (b + 1 < weights.n_blocks) {
            heads[(b + 1) % 2].set(rows);
        }
        const four_sums products = W::products(rows, -static_cast<ptrdiff_t>(W::BYTES), numbers, heads[b % 2]);
        if (b > 0) {
            sum = with_block<W::FORM>(sum, before, scales_before, blocks - sizeof(rounded_32));
        }
        before = products;
        scales_before = heads[b % 2].scales;
        numbers += BLOCK;
        blocks += sizeof(rounded_32);
    }
    sum = with_block<W::FORM>(sum, before, scales_before, blocks - sizeof(rounded_32));
    _mm512_store_ps(out[0], sum);
}

template <class W, class = void> constexpr bool AS_IT_LIES = false;
template <class W> constexpr bool AS_IT_LIES<W, std::void_t<typename W::head>> = true;

template <class W> constexpr bool OF_NIBBLES = false;

// One row with blocks of a scale of S bytes and 16 bytes of numbers. Of a block alone, scales would be collected from 16 rows one by one. But
// 4 / S blocks are a whole number of words of 32 bits, and are turned four words at a time, scales and numbers together. Of four times as many no
// word is left over.
// Numbers of a block begin in the middle of a word: byte i has number i in its lower half and number 16 + i in the other.
template <class W> class nibble_words {
public:
    static constexpr uint32_t S = W::BYTES - 16;
    static constexpr uint32_t TOGETHER = 4 / S; // blocks

    nibble_words(const piece<W> & weights, const rounded_rows & x) : weights_(weights), x_(x) {}

    // `sum` goes on by blocks from b on, N times TOGETHER of them.
    template <uint32_t N> [[gnu::always_inline]] __m512 multiply(uint32_t b, __m512 sum) {
        constexpr uint32_t WORDS = TOGETHER * W::BYTES / 4; // of blocks together
        static_assert(N == 4 || (N == 1 && WORDS % 4 == 1));
        const size_t offset = (weights_.first + b) * W::BYTES;
        const weight_rows rows = weights_.rows.from(offset);
#pragma GCC unroll 17
        for (uint32_t k = 0; k < N * WORDS / 4; ++k) {
            if (k % 4 == 0) {
                weights_.rows.template fetch_behind<1>(offset + k * 16);
            }
            __m512i words[4];
            rows.words(k * 16, words);
#pragma GCC unroll 4
            for (uint32_t i = 0; i < 4; ++i) {
                const uint32_t word = 4 * k + i;
                sum = add_word(word % WORDS, b + word / WORDS * TOGETHER, words[i], sum);
            }
        }
        if constexpr (N == 1) {
            sum = add_word(WORDS - 1, b, rows.word((WORDS - 1) * 4), sum);
        }
        return sum;
    }

private:
    // Word `i` of blocks from b on: block j has a part of words 4 j and 4 j + 4, and the three between them.
    [[gnu::always_inline]] __m512 add_word(uint32_t i, uint32_t b, __m512i word, __m512 sum) {
        if (i > 0) {
            const uint32_t j = (i - 1) / 4;
            const uint32_t before = S * (j + 1); // bytes of word 4 j + 4 that are this block's, and not of word 4 j
            const uint8_t * x = x_.at(0, b + j);
            if (i % 4 != 0) {
                const uint8_t * from = x + i % 4 * 4 - before;
                add(word, _mm512_set1_epi32(load<int32_t>(from)), _mm512_set1_epi32(load<int32_t>(from + 16)));
            } else {
                add(lower_bytes(before, word, edge_), edges(x, before), edges(x + 16, before));
                const __m512 scale = _mm512_set1_ps(load<float>(x_.block(0, b + j) + offsetof(rounded_32, scale)));
                const __m512 both = _mm512_mul_ps(W::scales_of(scales_, j), scale);
                const __m512 all = _mm512_cvtepi32_ps(_mm512_add_epi32(low_, high_));
                sum = _mm512_fmadd_ps(all, both, sum);
            }
        }
        if (i % 4 == 0 && i / 4 < TOGETHER) {
            // scales of all blocks together, as bytes of a word
            scales_ = i == 0 ? word : lower_bytes(S * (i / 4), scales_, word);
            edge_ = word;
            low_ = _mm512_set1_epi32(load<int32_t>(x_.block(0, b + i / 4) + offsetof(rounded_32, lift)));
            high_ = _mm512_setzero_si512();
        }
        return sum;
    }
    // n bytes of the first, the others of the second. n is less than 4, or all are.
    [[gnu::always_inline]] static __m512i lower_bytes(uint32_t n, __m512i first, __m512i second) {
        const auto mask = static_cast<int32_t>((uint64_t{1} << 8 * n) - 1);
        return n == 4 ? first : _mm512_ternarylogic_epi32(_mm512_set1_epi32(mask), first, second, 0xca);
    }
    // The last n of 16 numbers, then the first ones.
    [[gnu::always_inline]] static __m512i edges(const uint8_t * x, uint32_t n) {
        const auto last = load<uint32_t>(x + 12);
        return _mm512_set1_epi32(static_cast<int32_t>(n == 4 ? last : last >> (32 - 8 * n) | load<uint32_t>(x) << 8 * n));
    }
    [[gnu::always_inline]] void add(__m512i word, __m512i x_of_low, __m512i x_of_high) {
        low_ = _mm512_dpbusd_epi32(low_, W::low(word), x_of_low);
        high_ = _mm512_dpbusd_epi32(high_, W::high(word), x_of_high);
    }

    const piece<W> & weights_;
    const rounded_rows & x_;
    __m512i low_; // sums of a block
    __m512i high_;
    __m512i edge_;
    __m512i scales_;
};

// One row. Words are turned for as many blocks as are whole words; those that are left over go one by one.
template <class W> void multiply_one(const piece<W> & weights, const rounded_rows & x, sums * out) {
    if constexpr (AS_IT_LIES<W>) {
        return multiply_as_it_lies(weights, x, out);
    }
    uint32_t b = 0;
    if constexpr (OF_NIBBLES<W>) {
        nibble_words<W> words(weights, x);
        __m512 sum = _mm512_load_ps(out[0]);
        for (; b + 4 * words.TOGETHER <= weights.n_blocks; b += 4 * words.TOGETHER) {
            sum = words.template multiply<4>(b, sum);
        }
        for (; b + words.TOGETHER <= weights.n_blocks; b += words.TOGETHER) {
            sum = words.template multiply<1>(b, sum);
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

// Weights of a row at a time: all of them with one row, which unpacks nothing, else equal parts of a row, in whole pairs of blocks.
inline uint32_t part_of_row(uint32_t n_in, uint32_t n_rows) {
    const uint32_t n_parts = n_rows == 1 ? 1 : (n_in + CHUNK - 1) / CHUNK;
    return (n_in / n_parts + 2 * BLOCK - 1) / (2 * BLOCK) * (2 * BLOCK);
}

// N: rows at a time; multiply: as multiply_piece
template <class W, uint32_t N = MANY, class F>
inline void run_pieces(const product_job & job, uint32_t begin, uint32_t end, F multiply) {
    tile scratch;
    const size_t stride = row_bytes<rounded_32>(job.n_in);
    const uint32_t part = part_of_row(job.n_in, job.n_rows);
    const auto multiply_all = [&](const weight_rows & weights, const uint8_t * rows, uint32_t n, sums * out) {
        for (uint32_t in = 0; in < job.n_in; in += part) {
            const uint32_t b = in / BLOCK;
            const uint32_t n_blocks = (job.n_in - in < part ? job.n_in - in : part) / BLOCK;
            const uint8_t * blocks = rows + job.n_in + b * sizeof(rounded_32);
            multiply(scratch, piece<W>{weights, b, n_blocks}, {rows + in, blocks, stride}, n, out);
        }
    };
    run_tiles<weight_rows, N>(job, begin, end, stride, multiply_all);
}

template <class W> void run(const product_job & job, uint32_t begin, uint32_t end) {
    run_pieces<W>(job, begin, end, multiply_piece<W>);
}

} // namespace

} // namespace kvg::products_vnni
