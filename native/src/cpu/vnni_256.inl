// Products of weights in blocks of 256, by AVX-512 VNNI: all of them share a scale, and 16 or 32 have an integer of their own beside it.
//
// A type of weights is a struct W with
//   BYTES               of a block
//   PER_SCALE           numbers with an integer scale of their own: 16, 32, or 256 where there is none
//   MINIMA              whether what is added to a scaled number has a scale of its own
//   scales(to, rows)    fills a tile's scales and pairs from a block of 16 rows
//   numbers(rows, to)   calls to(j, v) for each vector j of its numbers
#include "cpu/rounded_rows.h"
#include "cpu/vnni.inl"

namespace kvg::products_vnni {

namespace {

constexpr uint32_t BLOCK = rounded_256::N;

// A block of 16 rows of weights: a lane is a row.
struct tile {
    __m512i numbers[BLOCK / 4]; // unsigned bytes: vector j has numbers 4j to 4j + 3
    __m512i scales[16];         // integers, of 16 or 32 numbers each
    __m512i pairs[8];           // two I16 in each lane, which meet two sums of 16 or 32 of a row's numbers, and are added
    __m512 scale;               // of them all
    __m512 pair_scale;          // instead, with MINIMA
};

// Rounded rows, at some block.
struct rounded_rows {
    const uint8_t * numbers;
    const uint8_t * blocks;
    size_t stride;

    rounded_rows from(uint32_t row) const { return {numbers + row * stride, blocks + row * stride, stride}; }
    const uint8_t * block(uint32_t row) const { return blocks + row * stride; }
    __m512i four(uint32_t row, uint32_t j) const { return _mm512_set1_epi32(load<int32_t>(numbers + row * stride + j * 4)); }
};

// Two integers that fit into 16 bits
inline __m512i paired(__m512i low, __m512i high) { return _mm512_mask_mov_epi16(low, 0xaaaaaaaa, _mm512_slli_epi32(high, 16)); }

// What is added to scaled numbers whose bytes are raised by 2 to the power of `bits`.
template <uint32_t PER_SCALE> inline void lower(tile & of, uint32_t bits) {
    for (uint32_t i = 0; i < BLOCK / PER_SCALE / 2; ++i) {
        const __m512i two = _mm512_slli_epi16(paired(of.scales[2 * i], of.scales[2 * i + 1]), bits);
        of.pairs[i] = _mm512_sub_epi16(_mm512_setzero_si512(), two);
    }
}

// Sums of a row's numbers times `pairs`
template <uint32_t PER_SCALE> inline __m512i add_pairs(const tile & with, const uint8_t * block) {
    constexpr uint32_t n = PER_SCALE == 16 ? 8 : 4;
    constexpr size_t sums = PER_SCALE == 16 ? offsetof(rounded_256, sums16) : offsetof(rounded_256, sums32);
    __m512i sum = _mm512_setzero_si512();
    for (uint32_t i = 0; i < n; ++i) {
        sum = _mm512_dpwssd_epi32(sum, with.pairs[i], _mm512_set1_epi32(load<int32_t>(block + sums + 4 * i)));
    }
    return sum;
}

// What a row's sum goes on by: `in_block` is the sum of its integers.
template <uint32_t PER_SCALE, bool MINIMA>
inline void add_block(const tile & weights, __m512i in_block, const uint8_t * block, float * out) {
    const __m512 scale = _mm512_set1_ps(load<float>(block));
    __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(in_block), _mm512_mul_ps(weights.scale, scale), _mm512_load_ps(out));
    if constexpr (MINIMA) {
        const __m512 minima = _mm512_cvtepi32_ps(add_pairs<PER_SCALE>(weights, block));
        sum = _mm512_fmadd_ps(minima, _mm512_mul_ps(weights.pair_scale, scale), sum);
    }
    _mm512_store_ps(out, sum);
}

template <uint32_t PER_SCALE, bool MINIMA, uint32_t N> void multiply(const tile & weights, const rounded_rows & x, sums * out) {
    constexpr uint32_t VECTORS = PER_SCALE / 4;
    __m512i sum[N];
    for (uint32_t r = 0; r < N; ++r) {
        sum[r] = MINIMA ? _mm512_setzero_si512() : add_pairs<PER_SCALE>(weights, x.block(r));
    }
    for (uint32_t s = 0; s < BLOCK / PER_SCALE; ++s) {
        __m512i products[N];
        for (uint32_t r = 0; r < N; ++r) {
            products[r] = PER_SCALE == BLOCK ? sum[r] : _mm512_setzero_si512();
        }
        for (uint32_t j = s * VECTORS; j < (s + 1) * VECTORS; ++j) {
            for (uint32_t r = 0; r < N; ++r) {
                products[r] = _mm512_dpbusd_epi32(products[r], weights.numbers[j], x.four(r, j));
            }
        }
        for (uint32_t r = 0; r < N; ++r) {
            const auto scaled = [&] { return _mm512_mullo_epi32(products[r], weights.scales[s]); };
            sum[r] = PER_SCALE == BLOCK ? products[r] : _mm512_add_epi32(sum[r], scaled());
        }
    }
    for (uint32_t r = 0; r < N; ++r) {
        add_block<PER_SCALE, MINIMA>(weights, sum[r], x.block(r), out[r]);
    }
}

// One row with weights as they are unpacked: all scales' products have an accumulator.
template <class W> void multiply_one(tile & scales, const weight_rows & weights, const rounded_rows & x, float * out) {
    constexpr bool SCALED = W::PER_SCALE != BLOCK;
    constexpr uint32_t N = SCALED ? BLOCK / W::PER_SCALE : 8; // not one, which each product would wait for
    W::scales(scales, weights);
    __m512i products[N];
    for (uint32_t s = 0; s < N; ++s) {
        products[s] = _mm512_setzero_si512();
    }
    W::numbers(weights, [&](uint32_t j, __m512i v) __attribute__((always_inline)) {
        __m512i & sum = products[SCALED ? j / (W::PER_SCALE / 4) : j % N];
        sum = _mm512_dpbusd_epi32(sum, v, x.four(0, j));
    });
    __m512i sum = W::MINIMA ? _mm512_setzero_si512() : add_pairs<W::PER_SCALE>(scales, x.block(0));
    for (uint32_t s = 0; s < N; ++s) {
        sum = _mm512_add_epi32(sum, !SCALED ? products[s] : _mm512_mullo_epi32(products[s], scales.scales[s]));
    }
    add_block<W::PER_SCALE, W::MINIMA>(scales, sum, x.block(0), out);
}

template <class W> void unpack(tile & to, const weight_rows & rows) {
    W::scales(to, rows);
    W::numbers(rows, [&](uint32_t j, __m512i v) __attribute__((always_inline)) { to.numbers[j] = v; });
}

template <class W> void run(const product_job & job, uint32_t begin, uint32_t end) {
    tile unpacked;
    const size_t stride = row_bytes<rounded_256>(job.n_in);
    run_tiles(job, begin, end, stride, [&](const weight_rows & weights, const uint8_t * rows, uint32_t n, sums * out) {
        for (uint32_t b = 0; b < job.n_in / BLOCK; ++b) {
            const weight_rows block = weights.from(b * W::BYTES);
            for (size_t line = 0; line < W::BYTES; line += 64) {
                block.fetch(line);
            }
            const rounded_rows x = {rows + b * BLOCK, rows + job.n_in + b * sizeof(rounded_256), stride};
            if (n == 1) {
                multiply_one<W>(unpacked, block, x, out[0]);
                continue;
            }
            unpack<W>(unpacked, block);
            by_eights(n,
                      [&](auto count, uint32_t r) { multiply<W::PER_SCALE, W::MINIMA, count>(unpacked, x.from(r), out + r); });
        }
    });
}

} // namespace

} // namespace kvg::products_vnni
