// K-quants on x86 with AVX-512 VNNI: 256 numbers share a scale, and 16 or 32 of them have an integer of their own beside it.
#ifdef __x86_64__
#include "cpu/rounded_rows.h"
#include "cpu/vnni.inl"

namespace kvg::products_vnni {

namespace {

constexpr uint32_t BLOCK = rounded_256::N;
constexpr uint32_t GROUP = 64; // numbers at a time

// Rounded rows, from some block on.
struct rounded_rows {
    const uint8_t * numbers;
    const uint8_t * blocks;
    size_t stride;

    rounded_rows from(uint32_t row) const { return {numbers + row * stride, blocks + row * stride, stride}; }
    const uint8_t * at(uint32_t row, uint32_t i) const { return numbers + row * stride + i; }
    const uint8_t * block(uint32_t row) const { return blocks + row * stride; }
};

// A block of 16 rows of weights, turned: a lane is a row. Vector j of `numbers` has numbers 4j to 4j + 3.
struct tile {
    alignas(64) int32_t numbers[BLOCK / 4][TILE];
    alignas(64) int32_t scales[16][TILE]; // integers, of 16 or 32 numbers each
    alignas(64) int32_t pairs[8][TILE];   // two I16 in each lane, which meet two sums of a row
    alignas(64) float scale[TILE];        // of them all
    alignas(64) float pair_scale[TILE];
};

inline __m512i word(const int32_t * lanes) { return _mm512_load_si512(lanes); }

// 16 bytes of each row: vector i has words i of all rows.
inline void load_words(const weight_rows & rows, size_t offset, __m512i words[4]) {
    __m512i v[4];
    for (int i = 0; i < 4; ++i) {
        const auto quarter = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows.at[row] + offset)); };
        v[i] = _mm512_castsi128_si512(quarter(i));
        v[i] = _mm512_inserti32x4(v[i], quarter(i + 4), 1);
        v[i] = _mm512_inserti32x4(v[i], quarter(i + 8), 2);
        v[i] = _mm512_inserti32x4(v[i], quarter(i + 12), 3);
    }
    const __m512i t[4] = {_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]),
                          _mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3])};
    words[0] = _mm512_unpacklo_epi64(t[0], t[2]);
    words[1] = _mm512_unpackhi_epi64(t[0], t[2]);
    words[2] = _mm512_unpacklo_epi64(t[1], t[3]);
    words[3] = _mm512_unpackhi_epi64(t[1], t[3]);
}

// Two integers that fit into 16 bits.
inline __m512i paired(__m512i low, __m512i high) {
    return _mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(high, 16));
}

// Two F16, 12 bytes of 8 scales and 8 minima in 6 bits, 256 numbers in 4 bits: scale * number - minimum
struct q4_k_weights {
    static constexpr size_t BYTES = 144;
    static constexpr uint32_t PER_SCALE = 32;

    static __m512i numbers(const uint8_t * block, uint32_t group) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(block + 16 + group * 32));
        const __m512i shifts = _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4);
        return _mm512_and_si512(_mm512_srlv_epi64(_mm512_broadcast_i64x4(both), shifts), _mm512_set1_epi8(0x0f));
    }
    // Of eight bytes: the first 6 bits of four, and of four the other half.
    static void unpack(__m512i bytes, __m512i low, __m512i high, int32_t (*to)[TILE]) {
        const __m512i four = _mm512_and_si512(bytes, _mm512_set1_epi8(0x3f));
        const __m512i top = _mm512_and_si512(_mm512_srli_epi32(high, 2), _mm512_set1_epi8(0x30));
        const __m512i more = _mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi8(0x0f)), top);
        for (uint32_t i = 0; i < 4; ++i) {
            const auto byte = [&](__m512i v) { return _mm512_and_si512(_mm512_srli_epi32(v, 8 * i), _mm512_set1_epi32(0xff)); };
            _mm512_store_si512(to[i], byte(four));
            _mm512_store_si512(to[i + 4], byte(more));
        }
    }
    static void scales(tile & to, const weight_rows & rows) {
        __m512i words[4];
        load_words(rows, 0, words);
        _mm512_store_ps(to.scale, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words[0])));
        const __m512 least = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words[0], 16)));
        _mm512_store_ps(to.pair_scale, _mm512_sub_ps(_mm512_setzero_ps(), least));
        alignas(64) int32_t minima[8][TILE];
        unpack(words[1], words[3], words[1], to.scales);
        unpack(words[2], _mm512_srli_epi32(words[3], 4), words[2], minima);
        for (uint32_t i = 0; i < 4; ++i) {
            _mm512_store_si512(to.pairs[i], paired(word(minima[2 * i]), word(minima[2 * i + 1])));
        }
    }
    // What a row's sum of the block comes to.
    static __m512 add(__m512 sum, const tile & with, __m512i products, const uint8_t * block) {
        __m512i least = _mm512_setzero_si512();
        for (uint32_t i = 0; i < 4; ++i) {
            const auto two = load<int32_t>(block + offsetof(rounded_256, sums32) + 4 * i);
            least = _mm512_dpwssd_epi32(least, word(with.pairs[i]), _mm512_set1_epi32(two));
        }
        const __m512 scale = _mm512_set1_ps(load<float>(block));
        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), _mm512_mul_ps(_mm512_load_ps(with.scale), scale), sum);
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(least), _mm512_mul_ps(_mm512_load_ps(with.pair_scale), scale), sum);
    }
};

// 128 bytes of lower and 64 of higher bits of 256 numbers of 6, 16 scales of 8 bits, an F16: scale * (number - 32)
struct q6_k_weights {
    static constexpr size_t BYTES = 210;
    static constexpr uint32_t PER_SCALE = 16;

    static __m512i numbers(const uint8_t * block, uint32_t group) {
        __m512i low = _mm512_loadu_si512(block + group / 2 * 64);
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(block + 128 + group / 2 * 32));
        __m512i high = _mm512_broadcast_i64x4(bits);
        if (group % 2 == 0) {
            high = _mm512_sllv_epi64(high, _mm512_setr_epi64(4, 4, 4, 4, 2, 2, 2, 2));
        } else {
            low = _mm512_srli_epi64(low, 4);
            high = _mm512_srlv_epi64(high, _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2));
        }
        return _mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi8(0x0f)), _mm512_and_si512(high, _mm512_set1_epi8(0x30)));
    }
    static void scales(tile & to, const weight_rows & rows) {
        __m512i words[4];
        load_words(rows, 192, words);
        for (uint32_t i = 0; i < 16; ++i) {
            _mm512_store_si512(to.scales[i], _mm512_srai_epi32(_mm512_slli_epi32(words[i / 4], 24 - 8 * (i % 4)), 24));
        }
        for (uint32_t i = 0; i < 8; ++i) {
            _mm512_store_si512(to.pairs[i], paired(word(to.scales[2 * i]), word(to.scales[2 * i + 1])));
        }
        _mm512_store_ps(to.scale, rows.halves(208));
    }
    static __m512 add(__m512 sum, const tile & with, __m512i products, const uint8_t * block) {
        __m512i sums = _mm512_setzero_si512();
        for (uint32_t i = 0; i < 8; ++i) {
            const auto two = load<int32_t>(block + offsetof(rounded_256, sums16) + 4 * i);
            sums = _mm512_dpwssd_epi32(sums, word(with.pairs[i]), _mm512_set1_epi32(two));
        }
        const __m512i whole = _mm512_sub_epi32(products, _mm512_slli_epi32(sums, 5));
        const __m512 scale = _mm512_set1_ps(load<float>(block));
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), _mm512_mul_ps(_mm512_load_ps(with.scale), scale), sum);
    }
};

inline __m512i add_scaled(__m512i sum, __m512i products, const int32_t * scales) {
    return _mm512_add_epi32(sum, _mm512_mullo_epi32(products, word(scales)));
}

// Of 64 numbers the products with 16 rows of weights: four vectors with sums of 16 numbers, of four rows each, meet the group's scales.
template <class W> inline __m512i add_group(__m512i sum, const __m512i fours[4], const tile & with, uint32_t group) {
    if constexpr (W::PER_SCALE == 32) {
        const __m512i left = halved(fours[0], fours[1]);
        const __m512i right = halved(fours[2], fours[3]);
        sum = add_scaled(sum, _mm512_shuffle_i32x4(left, right, 0x88), with.scales[group * 2]);
        return add_scaled(sum, _mm512_shuffle_i32x4(left, right, 0xdd), with.scales[group * 2 + 1]);
    } else {
        for (uint32_t half = 0; half < 2; ++half) { // quarters 0 and 2, then 1 and 3
            const auto pick = [&](uint32_t i) {
                return half == 0 ? _mm512_shuffle_i32x4(fours[i], fours[i + 1], 0x88)
                                 : _mm512_shuffle_i32x4(fours[i], fours[i + 1], 0xdd);
            };
            const __m512i left = pick(0);
            const __m512i right = pick(2);
            sum = add_scaled(sum, _mm512_shuffle_i32x4(left, right, 0x88), with.scales[group * 4 + half]);
            sum = add_scaled(sum, _mm512_shuffle_i32x4(left, right, 0xdd), with.scales[group * 4 + 2 + half]);
        }
        return sum;
    }
}

// N rows with a block of weights as they lie: each row of weights gives a vector of sums, and those of 16 are folded.
template <class W, uint32_t N>
void multiply_few(tile & scales, const weight_rows & weights, const rounded_rows & x, sums * out) {
    W::scales(scales, weights);
    __m512i sum[N];
    for (uint32_t r = 0; r < N; ++r) {
        sum[r] = _mm512_setzero_si512();
    }
#pragma GCC unroll 4
    for (uint32_t group = 0; group < BLOCK / GROUP; ++group) {
        __m512i fours[N][4];
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; ++i) {
            __m512i w[4];
            for (uint32_t k = 0; k < 4; ++k) {
                weights.fetch(4 * i + k, group * W::BYTES / 4);
                w[k] = W::numbers(weights.at[4 * i + k], group);
            }
            for (uint32_t r = 0; r < N; ++r) {
                const __m512i numbers = _mm512_loadu_si512(x.at(r, group * GROUP));
                const auto times = [&](int k) { return _mm512_dpbusd_epi32(_mm512_setzero_si512(), w[k], numbers); };
                const __m512i v[4] = {times(0), times(1), times(2), times(3)};
                fours[r][i] = folded(v);
            }
        }
        for (uint32_t r = 0; r < N; ++r) {
            sum[r] = add_group<W>(sum[r], fours[r], scales, group);
        }
    }
    for (uint32_t r = 0; r < N; ++r) {
        _mm512_store_ps(out[r], W::add(_mm512_load_ps(out[r]), scales, sum[r], x.block(r)));
    }
}

template <class W> void turn(tile & to, const weight_rows & from) {
    W::scales(to, from);
#pragma GCC unroll 4
    for (uint32_t group = 0; group < BLOCK / GROUP; ++group) {
        __m512i r[16];
        for (uint32_t i = 0; i < TILE; ++i) {
            from.fetch(i, group * W::BYTES / 4);
            r[i] = W::numbers(from.at[i], group);
        }
        transpose(r);
        for (uint32_t j = 0; j < 16; ++j) {
            _mm512_store_si512(to.numbers[group * 16 + j], r[j]);
        }
    }
}

// N rows with a turned tile: a vector of weights meets four bytes of each row.
template <class W, uint32_t N> void multiply(const tile & weights, const rounded_rows & x, sums * out) {
    constexpr uint32_t VECTORS = W::PER_SCALE / 4;
    __m512i sum[N];
    for (uint32_t r = 0; r < N; ++r) {
        sum[r] = _mm512_setzero_si512();
    }
    for (uint32_t s = 0; s < BLOCK / W::PER_SCALE; ++s) {
        __m512i products[N];
        for (uint32_t r = 0; r < N; ++r) {
            products[r] = _mm512_setzero_si512();
        }
        for (uint32_t j = s * VECTORS; j < (s + 1) * VECTORS; ++j) {
            const __m512i numbers = word(weights.numbers[j]);
            for (uint32_t r = 0; r < N; ++r) {
                products[r] = _mm512_dpbusd_epi32(products[r], numbers, _mm512_set1_epi32(load<int32_t>(x.at(r, j * 4))));
            }
        }
        for (uint32_t r = 0; r < N; ++r) {
            sum[r] = add_scaled(sum[r], products[r], weights.scales[s]);
        }
    }
    for (uint32_t r = 0; r < N; ++r) {
        _mm512_store_ps(out[r], W::add(_mm512_load_ps(out[r]), weights, sum[r], x.block(r)));
    }
}

template <class W>
void multiply_block(tile & turned, const weight_rows & weights, const rounded_rows & x, uint32_t n_rows, sums * out) {
    switch (n_rows) {
    case 1:
        return multiply_few<W, 1>(turned, weights, x, out);
    case 2:
        return multiply_few<W, 2>(turned, weights, x, out);
    case 3:
        return multiply_few<W, 3>(turned, weights, x, out);
    default: // turning pays
        turn<W>(turned, weights);
        by_eights(n_rows, [&](auto n, uint32_t r) { multiply<W, n>(turned, x.from(r), out + r); });
    }
}

template <class W> void run(const product_job & job, uint32_t begin, uint32_t end) {
    tile turned;
    const size_t stride = row_bytes<rounded_256>(job.n_in);
    run_tiles(job, begin, end, stride, [&](const weight_rows & weights, const uint8_t * rows, uint32_t n, sums * out) {
        for (uint32_t b = 0; b < job.n_in / BLOCK; ++b) {
            const uint8_t * blocks = rows + blocks_at(job.n_in) + b * sizeof(rounded_256);
            multiply_block<W>(turned, weights.from(b * W::BYTES), {rows + b * BLOCK, blocks, stride}, n, out);
        }
    });
}

} // namespace

extern const product_kernel q4_k;
extern const product_kernel q6_k;
const product_kernel q4_k = {by_256, run<q4_k_weights>};
const product_kernel q6_k = {by_256, run<q6_k_weights>};

} // namespace kvg::products_vnni
#endif
