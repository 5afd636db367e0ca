// Products of many rows with weights in blocks of 256, by AMX. Included after vnni_256.inl.
//
// Numbers are multiplied by their integer scales when they are unpacked, so that a block has one sum in place of 16 or 8. Most such products
// don't fit into a byte: their lower 7 bits are one byte, the bits above another.
#include "cpu/amx.inl"

namespace kvg::products_vnni {

namespace {

constexpr uint32_t LOW_BITS = 7;                  // not 8: bytes have signs
constexpr uint32_t STEP = 64;                     // numbers of each row that are multiplied at once
static_assert(BLOCK * 127 * 128 < MOST_ON_LARGE); // a block's sum of products of bytes; minima are bytes, too

using amx_256 = amx_registers<STEP>;

// Whether numbers times their scales fit into bytes. Those that have no integer scale do.
template <class W> constexpr bool IN_BYTES = W::PER_SCALE == BLOCK;

// The numbers of a tile times their scales, signed bytes: vector j has numbers 4j to 4j + 3.
struct scaled_tile {
    __m512i low[BLOCK / 4];
    __m512i high[BLOCK / 4]; // not used with IN_BYTES
};

// 16 bits of each lane in both of its halves
inline __m512i lower_twice(__m512i v) { return paired(v, v); }
inline __m512i upper_twice(__m512i v) { return lower_twice(_mm512_srli_epi32(v, 16)); }

// Without MINIMA numbers are also lowered here, by the tile's pairs.
template <class W> void multiply_by_scales(const tile & from, scaled_tile & to) {
    constexpr bool SCALED = W::PER_SCALE != BLOCK;
    constexpr uint32_t N = SCALED ? W::PER_SCALE : 32; // numbers with one half of a pair
    const __m512i even_bytes = _mm512_set1_epi16(0x00ff);
    const auto joined_bytes = [&](__m512i even, __m512i odd) { return _mm512_ternarylogic_epi32(even_bytes, even, odd, 0xca); };
    for (uint32_t s = 0; s < BLOCK / N; ++s) {
        const __m512i scale = SCALED ? lower_twice(from.scales[s]) : _mm512_set1_epi16(1);
        const __m512i pair = from.pairs[s / 2];
        const __m512i added = W::MINIMA ? _mm512_setzero_si512() : s % 2 == 0 ? lower_twice(pair) : upper_twice(pair);
        const auto scaled = [&](__m512i numbers) { return _mm512_add_epi16(_mm512_mullo_epi16(numbers, scale), added); };
        for (uint32_t j = s * N / 4; j < (s + 1) * N / 4; ++j) {
            const __m512i even = scaled(_mm512_and_si512(from.numbers[j], even_bytes)); // 16 bits each
            const __m512i odd = scaled(_mm512_srli_epi16(from.numbers[j], 8));
            const __m512i lowest = joined_bytes(even, _mm512_slli_epi16(odd, 8));
            if constexpr (IN_BYTES<W>) {
                to.low[j] = lowest;
            } else {
                to.low[j] = _mm512_and_si512(lowest, bytes((1 << LOW_BITS) - 1));
                to.high[j] = joined_bytes(_mm512_srli_epi16(even, LOW_BITS), _mm512_slli_epi16(odd, 8 - LOW_BITS));
            }
        }
    }
}

// Products of 16 rows with a block, or of 32 if there are TWO squares of them. Square 0 is of the first 16 rows with low bytes, 1 with high
// ones; 2 and 3 are of the other rows. meanwhile(i) is called in each of four steps.
template <bool TWO, bool HIGH, class F>
[[gnu::always_inline]] inline void multiply_block(const scaled_tile & weights, const rounded_rows & x, square * products,
                                                  F meanwhile) {
    const auto begin = [&](auto to) __attribute__((always_inline)) { amx_256::begin<to>(); };
    const auto end = [&](auto from) __attribute__((always_inline)) { amx_256::store<from>(products[from]); };
    const auto all = [&](auto each) __attribute__((always_inline)) {
        each(std::integral_constant<int, 0>());
        if constexpr (HIGH) {
            each(std::integral_constant<int, 1>());
        }
        if constexpr (TWO) {
            each(std::integral_constant<int, 2>());
        }
        if constexpr (TWO && HIGH) {
            each(std::integral_constant<int, 3>());
        }
    };
    all(begin);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < BLOCK / STEP; ++i) {
        amx_256::load<6>(weights.low + i * SQUARE, sizeof(__m512i));
        amx_256::load<4>(x.numbers + i * STEP, x.stride);
        amx_256::multiply<0, 4, 6>();
        if constexpr (HIGH) {
            amx_256::load<7>(weights.high + i * SQUARE, sizeof(__m512i));
            amx_256::multiply<1, 4, 7>();
        }
        if constexpr (TWO) {
            amx_256::load<5>(x.from(SQUARE).numbers + i * STEP, x.stride);
            amx_256::multiply<2, 5, 6>();
        }
        if constexpr (TWO && HIGH) {
            amx_256::multiply<3, 5, 7>();
        }
        meanwhile(i);
    }
    all(end);
}

// Sums of eight rows, from row `first` of x on, go on by their products with a block.
template <class W>
[[gnu::always_inline]] inline void add_eight(const block_scales & weights, const square * products, uint32_t first,
                                             const rounded_rows & x, sums * out) {
    const square * low_and_high = products + first / SQUARE * 2;
#pragma GCC unroll 8
    for (uint32_t r = first; r < first + 8; ++r) {
        __m512 sum = from_large(low_and_high[0].of[r % SQUARE]);
        if constexpr (!IN_BYTES<W>) { // rounded once, as the integer would be when it is made a float
            sum = _mm512_fmadd_ps(from_large(low_and_high[1].of[r % SQUARE]), _mm512_set1_ps(1 << LOW_BITS), sum);
        }
        __m512 minima = _mm512_setzero_ps();
        if constexpr (W::MINIMA) {
            const __m512i large = _mm512_castps_si512(_mm512_set1_ps(LARGE));
            minima = from_large(_mm512_castsi512_ps(add_pairs<W::PER_SCALE>(weights, x.block(r), large)));
        }
        add_products<W::MINIMA>(weights, sum, minima, x.block(r), out[r]);
    }
}

// Rows of whole squares with a block: 32 rows at a time, while the sums of those before go on.
template <class W>
void multiply_squares(const tile & weights, const scaled_tile & scaled, const rounded_rows & x, uint32_t n_rows, sums * out) {
    constexpr uint32_t TWO_SQUARES = 2 * SQUARE;
    constexpr bool HIGH = !IN_BYTES<W>;
    square products[2][4];
    const block_scales scales = weights; // a copy, which stays in registers: what assembly may change is read again
    const auto add = [&](uint32_t r, uint32_t first) __attribute__((always_inline)) {
        add_eight<W>(scales, products[r / TWO_SQUARES % 2], first, x.from(r), out + r);
    };
    uint32_t r = 0;
    for (; r + TWO_SQUARES <= n_rows; r += TWO_SQUARES) {
        const auto meanwhile = [&](uint32_t i) __attribute__((always_inline)) {
            if (r > 0) {
                add(r - TWO_SQUARES, i * 8);
            }
        };
        multiply_block<true, HIGH>(scaled, x.from(r), products[r / TWO_SQUARES % 2], meanwhile);
    }
    if (r < n_rows) {
        multiply_block<false, HIGH>(scaled, x.from(r), products[r / TWO_SQUARES % 2], [](uint32_t) {});
    }
    for (uint32_t first = r >= TWO_SQUARES ? r - TWO_SQUARES : 0; first < n_rows; first += 8) {
        add(first / TWO_SQUARES * TWO_SQUARES, first % TWO_SQUARES);
    }
}

// Rows of whole squares by AMX, those that are left over by VNNI
template <class W> void run_by_amx(const product_job & job, uint32_t begin, uint32_t end) {
    if (job.n_rows < SQUARE) {
        return run<W>(job, begin, end);
    }
    const amx_256 registers;
    tile scratch;
    scaled_tile scaled;
    const size_t stride = row_bytes<rounded_256>(job.n_in);
    const auto multiply_all = [&](const weight_rows & weights, const uint8_t * rows, uint32_t n, sums * out) {
        const uint32_t in_squares = n / SQUARE * SQUARE;
        for (uint32_t b = 0; b < job.n_in / BLOCK; ++b) {
            const rounded_rows x = rounded_rows{rows, rows + job.n_in, stride}.from_block(b);
            weights.fetch_behind<W::BYTES>(b * W::BYTES);
            unpack<W>(scratch, weights.from(b * W::BYTES));
            multiply_by_scales<W>(scratch, scaled);
            multiply_squares<W>(scratch, scaled, x, in_squares, out);
            by_eights(n - in_squares, [&](auto count, uint32_t i) {
                const uint32_t r = in_squares + i;
                multiply<W::PER_SCALE, W::MINIMA, count>(scratch, x.from(r), out + r);
            });
        }
    };
    run_tiles<weight_rows, MANY_BY_AMX>(job, begin, end, stride, multiply_all);
}

} // namespace

} // namespace kvg::products_vnni
