// Products of few rows of floats with Q4_K, Q5_K and Q6_K weights on AVX2. Elsewhere weights are turned first, so that each lane has a row.
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
//   each(to)      calls to(numbers, i, scales) for 32 numbers from number i on, and 16 scales, one of each two numbers
//   rest(row)     8 integers, whose sum is what the products with a row are too great by; with MINIMA the sum of its products with minima
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

template <class W, uint32_t N>
inline void sum_block(const uint8_t * block, const rounded_rows<rounded_256> & x, uint32_t b, uint32_t r, block_sums<N> & to) {
    const as_it_lies<W> weights(block);
    __m256i sum[N] = {};
    weights.each([&](__m256i numbers, int i, __m256i scales) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (uint32_t n = 0; n < N; ++n) {
            const __m256i pairs = _mm256_maddubs_epi16(numbers, load<__m256i>(x.numbers + n * x.stride + b * BLOCK + i));
            sum[n] = _mm256_add_epi32(sum[n], _mm256_madd_epi16(pairs, scales));
        }
    });
#pragma GCC unroll 4
    for (uint32_t n = 0; n < N; ++n) {
        const __m256i rest = weights.rest(x.block(n, b));
        if constexpr (W::MINIMA) {
            to.numbers[n].of_row[r] = sum[n];
            to.rest[n].of_row[r] = rest;
        } else {
            to.numbers[n].of_row[r] = _mm256_sub_epi32(sum[n], rest);
        }
    }
}

template <class W, uint32_t N>
void multiply_as_it_lies(const weight_rows & weights, const rounded_rows<rounded_256> & x, uint32_t n_blocks, float * out) {
    constexpr uint32_t MOST = 16 / N; // blocks, whose sums stay in L1
    block_sums<N> sums[MOST];
    for (uint32_t first = 0; first < n_blocks; first += MOST) {
        const uint32_t end = std::min(first + MOST, n_blocks);
        for (uint32_t r = 0; r < LANES; ++r) {
            for (uint32_t b = first; b < end; ++b) {
                const uint8_t * block = weights.at(r) + b * W::BYTES;
                fetch_later<W::BYTES>(block);
                sum_block<W, N>(block, x, b, r, sums[b - first]);
            }
        }
        for (uint32_t b = first; b < end; ++b) {
            // 4 bytes at a time: with MINIMA both scales; else the scale is the upper half, as the block ends behind it
            const words scales = weights.word(b * W::BYTES + as_it_lies<W>::SCALE - (W::MINIMA ? 0 : 2));
            for (uint32_t n = 0; n < N; ++n) {
                const rounded_256 & row = x.block(n, b);
                if constexpr (W::MINIMA) {
                    add_integers(sums[b - first].rest[n].added(), -low_halves(scales >> 16), row, out + n * TILE);
                    add_integers(sums[b - first].numbers[n].added(), low_halves(scales), row, out + n * TILE);
                } else {
                    add_integers(sums[b - first].numbers[n].added(), low_halves(scales >> 16), row, out + n * TILE);
                }
            }
        }
    }
}

template <class W> constexpr uint32_t ROWS_AS_IT_LIES<W, decltype(as_it_lies<W>::ROWS, void())> = as_it_lies<W>::ROWS;

} // namespace in_256

} // namespace

} // namespace kvg::KVG_PRODUCTS
