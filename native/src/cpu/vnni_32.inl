// Products of weights in blocks of 32, by AVX-512 VNNI.
//
// A type of weights is a struct W with
//   BYTES                  of a block
//   MINIMA                 whether a number is scale * byte + minimum, or else scale * (byte - 128)
//   numbers(from)          unsigned bytes of four blocks
//   scales(rows, offset)   what a block of each of 16 rows has beside them
#include "cpu/rounded_rows.h"
#include "cpu/vnni.inl"

namespace kvg::products_vnni {

namespace {

constexpr uint32_t BLOCK = rounded_32::N;
constexpr uint32_t CHUNK = 512; // weights of a row at a time: a turned tile of them stays in L1

constexpr uint32_t AT_ONCE = 4; // blocks

struct block_scales {
    __m512 scales;
    __m512 minima;
};

// Of four blocks: numbers 0 to 15 of each, and numbers 16 to 31.
struct block_halves {
    __m512i low;
    __m512i high;
};

// Four blocks of a row. The last one stands in for those that are missing.
struct four_blocks {
    const uint8_t * row;
    size_t at[AT_ONCE];

    const uint8_t * block(uint32_t i) const { return row + at[i]; }
    // 16 bytes of each block
    __m512i bytes(size_t offset) const {
        const auto pair = [&](uint32_t i) {
            return _mm256_inserti128_si256(_mm256_castsi128_si256(load_128(block(i) + offset)), load_128(block(i + 1) + offset),
                                           1);
        };
        return joined(pair(0), pair(2));
    }
};

// Blocks of 16 rows of weights.
template <class W> struct piece {
    weight_rows rows;
    uint32_t n_blocks;

    four_blocks four(uint32_t b) const {
        const auto at = [&](uint32_t i) { return (b + i < n_blocks ? b + i : n_blocks - 1) * W::BYTES; };
        return {nullptr, {at(0), at(1), at(2), at(3)}};
    }
    block_halves numbers(uint32_t row, four_blocks four) const {
        rows.fetch(row, four.at[0]);
        if constexpr (W::BYTES * AT_ONCE > 64) {
            rows.fetch(row, four.at[0] + 64);
        }
        if constexpr (W::BYTES * AT_ONCE > 128) { // else one line in sixteen is left out
            rows.fetch(row, four.at[0] + 128);
        }
        four.row = rows.at[row];
        return W::numbers(four);
    }
    block_scales scales(uint32_t b) const { return W::scales(rows, b * W::BYTES); }
};

// Rounded rows, from some block on.
struct rounded_rows {
    const uint8_t * numbers;
    const uint8_t * blocks;
    size_t stride;

    rounded_rows from(uint32_t row) const { return {numbers + row * stride, blocks + row * stride, stride}; }
    const uint8_t * at(uint32_t row, uint32_t b) const { return numbers + row * stride + b * BLOCK; }
    const uint8_t * block(uint32_t row, uint32_t b) const { return blocks + row * stride + b * sizeof(rounded_32); }
    // of blocks b to b + 3, as weights have theirs
    block_halves four(uint32_t row, uint32_t b) const {
        const __m512i first = _mm512_loadu_si512(at(row, b));
        const __m512i second = _mm512_loadu_si512(at(row, b + 2));
        return {_mm512_shuffle_i32x4(first, second, 0x88), _mm512_shuffle_i32x4(first, second, 0xdd)};
    }
};

// Where the sum of a block's products begins.
template <class W> inline __m512i start(const uint8_t * x) {
    return W::MINIMA ? _mm512_setzero_si512() : _mm512_set1_epi32(load<int32_t>(x + offsetof(rounded_32, lift)));
}

// One row's sum goes on by a block. Here alone floats are added.
template <class W> inline __m512 add_block(__m512 sum, __m512i in_block, const block_scales & weights, const uint8_t * x) {
    const __m512 scale = _mm512_set1_ps(load<float>(x + offsetof(rounded_32, scale)));
    if constexpr (W::MINIMA) {
        sum = _mm512_fmadd_ps(weights.minima, _mm512_set1_ps(load<float>(x + offsetof(rounded_32, total))), sum);
    }
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(in_block), _mm512_mul_ps(weights.scales, scale), sum);
}

// N rows with weights as they lie: each row of weights gives a vector of sums, and those of 16 are folded into one.
template <class W, uint32_t N> void multiply_few(const piece<W> & weights, const rounded_rows & x, sums * out) {
    __m512 sum[N];
    for (uint32_t r = 0; r < N; ++r) {
        sum[r] = _mm512_load_ps(out[r]);
    }
    for (uint32_t b = 0; b < weights.n_blocks; b += AT_ONCE) {
        const four_blocks four = weights.four(b);
        block_halves numbers[N];
        for (uint32_t r = 0; r < N; ++r) {
            numbers[r] = x.four(r, b);
        }
        __m512i rows[N][4]; // a quarter of i has what a block gives with rows 4i to 4i + 3
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; ++i) {
            __m512i v[N][4];
            for (uint32_t k = 0; k < 4; ++k) {
                const block_halves w = weights.numbers(4 * i + k, four);
                for (uint32_t r = 0; r < N; ++r) {
                    v[r][k] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w.low, numbers[r].low);
                    v[r][k] = _mm512_dpbusd_epi32(v[r][k], w.high, numbers[r].high);
                }
            }
            for (uint32_t r = 0; r < N; ++r) {
                rows[r][i] = folded(v[r]);
            }
        }
        for (uint32_t r = 0; r < N; ++r) {
            transpose_quarters(rows[r]);
        }
        for (uint32_t i = 0; i < AT_ONCE && b + i < weights.n_blocks; ++i) {
            const block_scales scales = weights.scales(b + i);
            for (uint32_t r = 0; r < N; ++r) {
                const uint8_t * block = x.block(r, b + i);
                sum[r] = add_block<W>(sum[r], _mm512_add_epi32(rows[r][i], start<W>(block)), scales, block);
            }
        }
    }
    for (uint32_t r = 0; r < N; ++r) {
        _mm512_store_ps(out[r], sum[r]);
    }
}

// 16 rows of weights, turned: vector j of a block has numbers 4j to 4j + 3 of each row.
struct tile {
    alignas(64) int32_t numbers[CHUNK / 4][TILE];
    block_scales scales[CHUNK / BLOCK];
    uint32_t n_blocks;
};

template <class W> void turn(tile & to, const piece<W> & from) {
    to.n_blocks = from.n_blocks;
    for (uint32_t b = 0; b < from.n_blocks; b += AT_ONCE) {
        const four_blocks four = from.four(b);
        __m512i low[TILE];
        __m512i high[TILE];
        for (uint32_t i = 0; i < TILE; ++i) {
            const block_halves numbers = from.numbers(i, four);
            low[i] = numbers.low;
            high[i] = numbers.high;
        }
        transpose(low);
        transpose(high);
        for (uint32_t j = 0; j < 16; ++j) {
            _mm512_store_si512(to.numbers[b * 8 + j / 4 * 8 + j % 4], low[j]);
            _mm512_store_si512(to.numbers[b * 8 + j / 4 * 8 + 4 + j % 4], high[j]);
        }
        for (uint32_t i = b; i < b + AT_ONCE && i < from.n_blocks; ++i) {
            to.scales[i] = from.scales(i);
        }
    }
}

// N rows with a turned tile: a vector of weights meets four bytes of each row.
template <class W, uint32_t N> void multiply(const tile & weights, const rounded_rows & x, sums * out) {
    __m512 sum[N];
    for (uint32_t r = 0; r < N; ++r) {
        sum[r] = _mm512_load_ps(out[r]);
    }
    for (uint32_t b = 0; b < weights.n_blocks; ++b) {
        __m512i in_block[N];
        for (uint32_t r = 0; r < N; ++r) {
            in_block[r] = start<W>(x.block(r, b));
        }
        for (uint32_t j = 0; j < 8; ++j) {
            const __m512i numbers = _mm512_load_si512(weights.numbers[b * 8 + j]);
            for (uint32_t r = 0; r < N; ++r) {
                in_block[r] = _mm512_dpbusd_epi32(in_block[r], numbers, _mm512_set1_epi32(load<int32_t>(x.at(r, b) + j * 4)));
            }
        }
        for (uint32_t r = 0; r < N; ++r) {
            sum[r] = add_block<W>(sum[r], in_block[r], weights.scales[b], x.block(r, b));
        }
    }
    for (uint32_t r = 0; r < N; ++r) {
        _mm512_store_ps(out[r], sum[r]);
    }
}

template <class W>
void multiply_piece(tile & turned, const piece<W> & weights, const rounded_rows & x, uint32_t n_rows, sums * out) {
    switch (n_rows) {
    case 1:
        return multiply_few<W, 1>(weights, x, out);
    case 2:
        return multiply_few<W, 2>(weights, x, out);
    case 3:
        return multiply_few<W, 3>(weights, x, out);
    default: // turning pays
        turn(turned, weights);
        by_eights(n_rows, [&](auto n, uint32_t r) { multiply<W, n>(turned, x.from(r), out + r); });
    }
}

template <class W> void run(const product_job & job, uint32_t begin, uint32_t end) {
    tile turned;
    const size_t stride = row_bytes<rounded_32>(job.n_in);
    run_tiles(job, begin, end, stride, [&](const weight_rows & weights, const uint8_t * rows, uint32_t n, sums * out) {
        for (uint32_t in = 0; in < job.n_in; in += CHUNK) {
            const uint32_t b = in / BLOCK;
            const uint32_t n_blocks = (job.n_in - in < CHUNK ? job.n_in - in : CHUNK) / BLOCK;
            const uint8_t * blocks = rows + blocks_at(job.n_in) + b * sizeof(rounded_32);
            multiply_piece<W>(turned, {weights.from(b * W::BYTES), n_blocks}, {rows + in, blocks, stride}, n, out);
        }
    });
}

} // namespace

} // namespace kvg::products_vnni
