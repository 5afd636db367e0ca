// Products of few rows of floats with Q4_K, Q5_K, Q6_K and IQ4_XS weights on AVX2. Elsewhere weights are turned first, so that each lane has
// a row.
// With few rows of floats turning takes longer than the products, and it reads 16 rows of weights at a time, of which a CPU fetches too few
// ahead. So here each row of weights is multiplied as it lies, one behind the other, and 8 rows' sums are turned at the end. The sums of
// integers are the same either way, and floats are added in the same order. Included behind types_256.inl.

namespace kvg::KVG_PRODUCTS {

namespace {

namespace in_256 {

// For each row of weights 8 integers, whose sum is the row's.
struct row_sums {
    __m256i of_row[LANES];

    ints added() const {
        return as_ints(_mm256_permute2x128_si256(four(0), four(4), 0x20)) +
               as_ints(_mm256_permute2x128_si256(four(0), four(4), 0x31));
    }

private:
    __m256i four(size_t i) const {
        const __m256i * v = of_row + i;
        return _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    }
};

// eight: the same 8 scales of 16 bits in both halves. Returns scale `low` in all of the first half, and scale `high` in all of the second.
inline __m256i two_of(__m256i eight, int low, int high) {
    const auto bytes = [](int i) { return _mm_set1_epi16(static_cast<int16_t>(0x0100 + 0x0202 * i)); };
    return _mm256_shuffle_epi8(eight, _mm256_set_m128i(bytes(high), bytes(low)));
}
inline __m256i masked(__m256i bytes, int8_t mask) { return _mm256_and_si256(bytes, _mm256_set1_epi8(mask)); }
// Bits of bytes, moved up or down; those that cross into another byte are masked.
inline __m256i shifted(__m256i bytes, int up, int8_t mask) {
    return masked(up < 0 ? _mm256_srli_epi16(bytes, -up) : _mm256_slli_epi16(bytes, up), mask);
}
// A block of a type, and how it is multiplied as it lies:
//   ROWS          with up to so many rows of floats this is faster; measured on Zen 3
//   SCALE         offset of the block's scale, of 2 bytes; with MINIMA the scale of minima follows it
//   each(to)      calls to(numbers, i, scales) for 32 numbers from number i on, and 16 scales, one of each two numbers. Numbers with signs
//                 are in the order of rows_for_signs
//   rest(row)     not where numbers have signs: 8 integers, whose sum is what the products with a row are too great by; with MINIMA the sum
//                 of its products with minima
template <class W> struct as_it_lies;

template <> struct as_it_lies<q6_k_weights> {
    static constexpr uint32_t ROWS = 4;
    static constexpr size_t SCALE = 208;
    const uint8_t * block;
    __m256i scales;

    explicit as_it_lies(const uint8_t * block) : block(block), scales(_mm256_cvtepi8_epi16(load<__m128i>(block + 192))) {}

    template <class F> void each(F to) const {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const __m256i eight = half == 0 ? _mm256_permute4x64_epi64(scales, 0x44) : _mm256_permute4x64_epi64(scales, 0xee);
            const __m256i high = load<__m256i>(block + 128 + half * 32);
#pragma GCC unroll 2
            for (int k = 0; k < 2; ++k) { // 32 numbers, and those 64 further on
                const __m256i both = load<__m256i>(block + half * 64 + k * 32);
                const int i = half * 128 + k * 32;
                to(masked(both, 0x0f) | shifted(high, 4 - 2 * k, 0x30), i, two_of(eight, 2 * k, 2 * k + 1));
                to(shifted(both, -4, 0x0f) | shifted(high, -2 * k, 0x30), i + 64, two_of(eight, 2 * k + 4, 2 * k + 5));
            }
        }
    }
    __m256i rest(const rounded_256 & row) const { // numbers are 32 too great
        return _mm256_madd_epi16(_mm256_slli_epi16(scales, 5), load<__m256i>(row.sums16));
    }
};

// Of Q4_K and Q5_K: 8 scales and 8 minima of 6 bits
struct six_bits {
    static constexpr uint32_t ROWS = 2;
    static constexpr size_t SCALE = 0;
    const uint8_t * block;
    __m256i scales; // twice
    __m128i minima;

    explicit six_bits(const uint8_t * block) : block(block) {
        const auto a = load<uint32_t>(block + 4), b = load<uint32_t>(block + 8), c = load<uint32_t>(block + 12);
        // As 16 bits each. first: the first four, and upper bits of the others. low: their lower halves
        const auto eight = [](uint32_t first, uint32_t low) {
            const uint32_t last = (low & 0x0f0f0f0f) | (first >> 2 & 0x30303030);
            return _mm_cvtepi8_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(uint64_t{last} << 32 | (first & 0x3f3f3f3f))));
        };
        scales = _mm256_broadcastsi128_si256(eight(a, c));
        minima = eight(b, c >> 4);
    }
    __m256i rest(const rounded_256 & row) const {
        return _mm256_zextsi128_si256(_mm_madd_epi16(minima, load<__m128i>(row.sums32)));
    }
};

template <> struct as_it_lies<q4_k_weights> : six_bits {
    using six_bits::six_bits;

    template <class F> void each(F to) const {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) { // 32 numbers, and the next 32
            const __m256i both = load<__m256i>(block + 16 + i * 32);
            to(masked(both, 0x0f), i * 64, two_of(scales, 2 * i, 2 * i));
            to(shifted(both, -4, 0x0f), i * 64 + 32, two_of(scales, 2 * i + 1, 2 * i + 1));
        }
    }
};

template <> struct as_it_lies<q5_k_weights> : six_bits {
    using six_bits::six_bits;

    template <class F> void each(F to) const {
        const __m256i high = load<__m256i>(block + 16);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) { // 32 numbers, and the next 32
            const __m256i both = load<__m256i>(block + 48 + i * 32);
            to(masked(both, 0x0f) | shifted(high, 4 - 2 * i, 0x10), i * 64, two_of(scales, 2 * i, 2 * i));
            to(shifted(both, -4, 0x0f) | shifted(high, 3 - 2 * i, 0x10), i * 64 + 32, two_of(scales, 2 * i + 1, 2 * i + 1));
        }
    }
};

template <> struct as_it_lies<iq4_xs_weights> {
    static constexpr uint32_t ROWS = 4;
    static constexpr size_t SCALE = 0;
    const uint8_t * block;
    __m256i scales; // of 32 bits: 0, 2, 4, 6 and 1, 3, 5, 7

    explicit as_it_lies(const uint8_t * block) : block(block) {
        const auto down = [](uint32_t four_bytes, __m256i bits, int mask) {
            const __m256i moved = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(four_bytes)), bits);
            return _mm256_and_si256(moved, _mm256_set1_epi32(mask));
        };
        const __m256i upper = down(load<uint32_t>(block), _mm256_setr_epi32(16, 20, 24, 28, 18, 22, 26, 30), 0x03);
        const __m256i lower = down(load<uint32_t>(block + 4), _mm256_setr_epi32(0, 8, 16, 24, 4, 12, 20, 28), 0x0f);
        scales = _mm256_sub_epi32(_mm256_slli_epi32(upper, 4) | lower, _mm256_set1_epi32(32));
    }

    template <class F> void each(F to) const {
        const __m256i table = _mm256_broadcastsi128_si256(load<__m128i>(FOUR_BITS));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) { // of twice 32 numbers the first and the last 16
            const __m256i both = load<__m256i>(block + 8 + i * 32);
            const __m256i two = _mm256_shuffle_epi8(scales, _mm256_set1_epi16(static_cast<int16_t>(0x0100 + 0x0404 * i)));
            to(_mm256_shuffle_epi8(table, masked(both, 0x0f)), i * 64, two);
            to(_mm256_shuffle_epi8(table, shifted(both, -4, 0x0f)), i * 64 + 32, two);
        }
    }
};

template <uint32_t N> constexpr uint32_t MOST_BLOCKS = 16 / N; // at a time, of N rows of floats: their sums stay in L1

// Rows of floats for weights without signs: as they were rounded.
template <uint32_t N> struct rows_as_rounded {
    const rounded_rows<rounded_256> & x;

    void set(uint32_t /*first*/, uint32_t /*end*/) {}
    // 32 products with numbers i and so on of row n's block b, in pairs
    __m256i pairs(__m256i weights, uint32_t n, uint32_t b, int i) const {
        return _mm256_maddubs_epi16(weights, load<__m256i>(x.numbers + n * x.stride + b * BLOCK + static_cast<uint32_t>(i)));
    }
};

// For weights with signs, of which none is -128: sizes of the rows' numbers, as the instruction wants one side without signs, and the
// numbers, whose signs weights get. Of each 64 the first halves of both 32 come first, as they do in bytes with two weights of 4 bits.
template <uint32_t N> struct rows_for_signs {
    const rounded_rows<rounded_256> & x;
    alignas(32) uint8_t sizes[N][MOST_BLOCKS<N> * BLOCK];
    alignas(32) uint8_t numbers[N][MOST_BLOCKS<N> * BLOCK];

    explicit rows_for_signs(const rounded_rows<rounded_256> & x) : x(x) {}
    void set(uint32_t first, uint32_t end) {
        for (uint32_t n = 0; n < N; ++n) {
            for (uint32_t i = 0; i < (end - first) * BLOCK; i += 64) {
                const uint8_t * from = x.numbers + n * x.stride + first * BLOCK + i;
                const __m256i a = load<__m256i>(from), b = load<__m256i>(from + 32);
                const __m256i halves[2] = {_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31)};
                for (uint32_t k = 0; k < 2; ++k) {
                    store(sizes[n] + i + k * 32, _mm256_abs_epi8(halves[k]));
                    store(numbers[n] + i + k * 32, halves[k]);
                }
            }
        }
    }
    __m256i pairs(__m256i weights, uint32_t n, uint32_t b, int i) const {
        const uint32_t place = b % MOST_BLOCKS<N> * BLOCK + static_cast<uint32_t>(i);
        return _mm256_maddubs_epi16(load<__m256i>(sizes[n] + place),
                                    _mm256_sign_epi8(weights, load<__m256i>(numbers[n] + place)));
    }
};

template <class W, uint32_t N> using rows_for = std::conditional_t<W::SIGNED, rows_for_signs<N>, rows_as_rounded<N>>;

// Rows lie behind one another, so this is what is read some rows later.
template <size_t N> [[gnu::always_inline]] inline void fetch_later(const uint8_t * block) {
    constexpr size_t LATER = 2048; // of 512, 1024, 2048 and 4096 the fastest on Zen 3
    for (size_t line = 0; line < N; line += 64) {
        __builtin_prefetch(block + LATER + line);
    }
}

// Of N rows of floats and a block of LANES rows of weights
template <uint32_t N> struct block_sums {
    row_sums numbers[N];
    row_sums rest[N];
};

// Of row r of weights
template <class W, uint32_t N>
inline void sum_block(const uint8_t * block, const rows_for<W, N> & rows, uint32_t b, uint32_t r, block_sums<N> & to) {
    const as_it_lies<W> weights(block);
    __m256i sum[N] = {};
    weights.each([&](__m256i numbers, int i, __m256i scales) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (uint32_t n = 0; n < N; ++n) {
            sum[n] = _mm256_add_epi32(sum[n], _mm256_madd_epi16(rows.pairs(numbers, n, b, i), scales));
        }
    });
#pragma GCC unroll 4
    for (uint32_t n = 0; n < N; ++n) {
        if constexpr (W::MINIMA) {
            to.rest[n].of_row[r] = weights.rest(rows.x.block(n, b));
        } else if constexpr (!W::SIGNED) {
            sum[n] = _mm256_sub_epi32(sum[n], weights.rest(rows.x.block(n, b)));
        }
        to.numbers[n].of_row[r] = sum[n];
    }
}

// Adds a block's sums, times the scales, to those of floats.
template <class W, uint32_t N>
inline void add_scaled(const block_sums<N> & sums, const weight_rows & weights, const rounded_rows<rounded_256> & x, uint32_t b,
                       float * out) {
    const size_t at = b * W::BYTES + as_it_lies<W>::SCALE;
    floats scale;
    floats of_minima;
    if constexpr (W::MINIMA) {
        both_halves(weights.word(at), scale, of_minima);
    } else {
        scale = weights.halves(at);
    }
    for (uint32_t n = 0; n < N; ++n) {
        if constexpr (W::MINIMA) {
            add_integers(sums.rest[n].added(), -of_minima, x.block(n, b), out + n * TILE);
        }
        add_integers(sums.numbers[n].added(), scale, x.block(n, b), out + n * TILE);
    }
}

template <class W, uint32_t N>
void multiply_as_it_lies(const weight_rows & weights, const rounded_rows<rounded_256> & x, uint32_t n_blocks, float * out) {
    block_sums<N> sums[MOST_BLOCKS<N>];
    rows_for<W, N> rows{x};
    for (uint32_t first = 0; first < n_blocks; first += MOST_BLOCKS<N>) {
        const uint32_t end = std::min(first + MOST_BLOCKS<N>, n_blocks);
        rows.set(first, end);
        for (uint32_t r = 0; r < LANES; ++r) {
            for (uint32_t b = first; b < end; ++b) {
                const uint8_t * block = weights.at(r) + b * W::BYTES;
                fetch_later<W::BYTES>(block);
                sum_block<W, N>(block, rows, b, r, sums[b - first]);
            }
        }
        for (uint32_t b = first; b < end; ++b) {
            add_scaled<W, N>(sums[b - first], weights, x, b, out);
        }
    }
}

template <class W> constexpr uint32_t ROWS_AS_IT_LIES<W, decltype(as_it_lies<W>::ROWS, void())> = as_it_lies<W>::ROWS;

} // namespace in_256

} // namespace

} // namespace kvg::KVG_PRODUCTS
