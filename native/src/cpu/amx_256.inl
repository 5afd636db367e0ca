// Products of many rows with weights in blocks of 256, by AMX. Included behind vnni_256.inl.
//
// Numbers are multiplied by their integer scales while they are unpacked, so that a block has one sum in place of 16 or 8. Such a product may
// have 15 bits: its lower 7 bits are one byte, the others another.
#include "cpu/amx.inl"

namespace kvg::products_vnni {

namespace {

constexpr uint32_t LOW_BITS = 7;
constexpr uint32_t STEP = 64;                         // numbers of each row that are multiplied at once
static_assert(BLOCK * 127 * 127 < MOST_BESIDE_LARGE); // a sum of a block's products of bytes

using amx_256 = amx_registers<STEP>;

// Whether numbers times their scales are bytes: then there is no upper one.
template <class W> constexpr bool SMALL = W::PER_SCALE == BLOCK;

// The numbers of a tile times their scales, signed bytes: vector j has numbers 4j to 4j + 3.
struct scaled_tile {
    __m512i low[BLOCK / 4];
    __m512i high[BLOCK / 4];
};

// 16 bits of each lane in both of its halves
inline __m512i lower_twice(__m512i v) { return paired(v, v); }
inline __m512i upper_twice(__m512i v) { return lower_twice(_mm512_srli_epi32(v, 16)); }

template <class W, bool MINIMA> void multiply_by_scales(const tile & from, scaled_tile & to) {
    constexpr bool SCALED = W::PER_SCALE != BLOCK;
    constexpr uint32_t N = SCALED ? W::PER_SCALE : 32; // numbers with one half of a pair
    const __m512i even = _mm512_set1_epi16(0x00ff);
    const __m512i low = bytes((1 << LOW_BITS) - 1);
    for (uint32_t s = 0; s < BLOCK / N; ++s) {
        const __m512i scale = SCALED ? lower_twice(from.scales[s]) : _mm512_set1_epi16(1);
        const __m512i pair = from.pairs[s / 2];
        const __m512i lowered = MINIMA ? _mm512_setzero_si512() : s % 2 == 0 ? lower_twice(pair) : upper_twice(pair);
        const auto scaled = [&](__m512i numbers) { return _mm512_add_epi16(_mm512_mullo_epi16(numbers, scale), lowered); };
        for (uint32_t j = s * N / 4; j < (s + 1) * N / 4; ++j) {
            const __m512i a = scaled(_mm512_and_si512(from.numbers[j], even));
            const __m512i b = scaled(_mm512_srli_epi16(from.numbers[j], 8));
            // of each 16 bits the even byte from a, the odd one from b
            const auto both = [&](__m512i a, __m512i b) { return _mm512_ternarylogic_epi32(even, a, b, 0xca); };
            const __m512i lower = both(a, _mm512_slli_epi16(b, 8));
            to.low[j] = SMALL<W> ? lower : _mm512_and_si512(lower, low);
            to.high[j] = both(_mm512_srli_epi16(a, LOW_BITS), _mm512_slli_epi16(b, 8 - LOW_BITS));
        }
    }
}

// Products of 16 rows with a block, or of 32 if there are TWO squares of them. meanwhile(i) is called in each of four steps.
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
        amx_256::add_products<0, 4, 6>();
        if constexpr (HIGH) {
            amx_256::load<7>(weights.high + i * SQUARE, sizeof(__m512i));
            amx_256::add_products<1, 4, 7>();
        }
        if constexpr (TWO) {
            amx_256::load<5>(x.from(SQUARE).numbers + i * STEP, x.stride);
            amx_256::add_products<2, 5, 6>();
        }
        if constexpr (TWO && HIGH) {
            amx_256::add_products<3, 5, 7>();
        }
        meanwhile(i);
    }
    all(end);
}

// The sums of rows with products go on, eight at a time.
template <class W, bool MINIMA>
[[gnu::always_inline]] inline void add_eight(const block_scales & weights, const square * products, uint32_t first,
                                             const rounded_rows & x, sums * out) {
    const square * both = products + first / SQUARE * 2; // lower and upper bytes
#pragma GCC unroll 8
    for (uint32_t r = first; r < first + 8; ++r) {
        __m512 sum = from_large(both[0].of[r % SQUARE]);
        if constexpr (!SMALL<W>) { // exact but for the last rounding, which is that of the integer
            sum = _mm512_fmadd_ps(from_large(both[1].of[r % SQUARE]), _mm512_set1_ps(1 << LOW_BITS), sum);
        }
        __m512 minima = _mm512_setzero_ps();
        if constexpr (MINIMA) {
            const __m512i large = _mm512_castps_si512(_mm512_set1_ps(LARGE));
            minima = from_large(_mm512_castsi512_ps(add_pairs<W::PER_SCALE>(weights, x.block(r), large)));
        }
        add_products<MINIMA>(weights, sum, minima, x.block(r), out[r]);
    }
}

// Whole squares of rows with a block: 32 rows at a time, while the sums of those before go on.
template <class W, bool MINIMA>
void multiply_squares(const tile & weights, const scaled_tile & scaled, const rounded_rows & x, uint32_t n_rows, sums * out) {
    constexpr uint32_t BOTH = 2 * SQUARE;
    constexpr bool HIGH = !SMALL<W>;
    square products[2][4];
    const block_scales scales = weights; // in registers
    const auto add = [&](uint32_t r, uint32_t first) __attribute__((always_inline)) {
        add_eight<W, MINIMA>(scales, products[r / BOTH % 2], first, x.from(r), out + r);
    };
    uint32_t r = 0;
    for (; r + BOTH <= n_rows; r += BOTH) {
        const auto meanwhile = [&](uint32_t i) __attribute__((always_inline)) {
            if (r > 0) {
                add(r - BOTH, i * 8);
            }
        };
        multiply_block<true, HIGH>(scaled, x.from(r), products[r / BOTH % 2], meanwhile);
    }
    if (r < n_rows) {
        multiply_block<false, HIGH>(scaled, x.from(r), products[r / BOTH % 2], [](uint32_t) {});
    }
    for (uint32_t first = r >= BOTH ? r - BOTH : 0; first < n_rows; first += 8) {
        add(first / BOTH * BOTH, first % BOTH);
    }
}

// What a type does by lanes, or row by row
template <class W, class = void> struct way_of {
    static constexpr bool MINIMA = W::MINIMA;
    static void unpack_block(tile & to, const weight_rows & rows) { unpack<W>(to, rows); }
    static void run(const product_job & job, uint32_t begin, uint32_t end) { run_by_lanes<W>(job, begin, end); }
};
template <class W> struct way_of<W, std::void_t<typename W::of_row>> {
    static constexpr bool MINIMA = false;
    static void unpack_block(tile & to, const weight_rows & rows) { unpack_rows<W>(to, rows); }
    static void run(const product_job & job, uint32_t begin, uint32_t end) { run_by_rows<W>(job, begin, end); }
};

// Whole squares of rows by AMX, those that are left over by VNNI
template <class W> void run_squares(const product_job & job, uint32_t begin, uint32_t end) {
    using way = way_of<W>;
    if (job.n_rows < SQUARE) {
        return way::run(job, begin, end);
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
            way::unpack_block(scratch, weights.from(b * W::BYTES));
            multiply_by_scales<W, way::MINIMA>(scratch, scaled);
            multiply_squares<W, way::MINIMA>(scratch, scaled, x, in_squares, out);
            by_eights(n - in_squares, [&](auto count, uint32_t i) {
                const uint32_t r = in_squares + i;
                multiply<W::PER_SCALE, way::MINIMA, count>(scratch, x.from(r), out + r);
            });
        }
    };
    run_tiles<weight_rows, MANY_SQUARES>(job, begin, end, stride, multiply_all);
}

} // namespace

} // namespace kvg::products_vnni
