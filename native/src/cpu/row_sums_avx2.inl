// Products of one row of floats with Q6_K and Q5_K weights on AVX2. Elsewhere weights are turned first, so that each lane has a row. For these
// types turning takes longer than the products. So each row of weights is multiplied as it lies, and 8 rows' sums are turned at the end. The
// sums of integers are the same either way. Included behind types_256.inl.

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
// Adds the products of 32 weights and 32 rounded floats, times the weights' scales.
inline void add_scaled(__m256i & sum, __m256i numbers, const uint8_t * x, __m256i scales) {
    const __m256i pairs = _mm256_maddubs_epi16(numbers, load<__m256i>(x));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, scales));
}

// Q6_K: 256 numbers of 6 bits, less 32
inline __m256i row_sum(const uint8_t * block, const uint8_t * x, const rounded_256 & row) {
    const __m256i scales = _mm256_cvtepi8_epi16(load<__m128i>(block + 192));
    __m256i sum = _mm256_sub_epi32(__m256i{}, _mm256_madd_epi16(_mm256_slli_epi16(scales, 5), load<__m256i>(row.sums16)));
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        const __m256i eight = half == 0 ? _mm256_permute4x64_epi64(scales, 0x44) : _mm256_permute4x64_epi64(scales, 0xee);
        const __m256i high = load<__m256i>(block + 128 + half * 32);
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k) { // 32 numbers, and those 64 further on
            const __m256i both = load<__m256i>(block + half * 64 + k * 32);
            const uint8_t * at = x + half * 128 + k * 32;
            const __m256i near = masked(both, 0x0f) | masked(_mm256_slli_epi16(high, 4 - 2 * k), 0x30);
            add_scaled(sum, near, at, two_of(eight, 2 * k, 2 * k + 1));
            const __m256i far = masked(_mm256_srli_epi16(both, 4), 0x0f) | masked(_mm256_srli_epi16(high, 2 * k), 0x30);
            add_scaled(sum, far, at + 64, two_of(eight, 2 * k + 4, 2 * k + 5));
        }
    }
    return sum;
}

template <>
inline void multiply_one<q6_k_weights>(const weight_rows & weights, const rounded_rows<rounded_256> & x, float * out) {
    row_sums sums;
    for (uint32_t r = 0; r < LANES; ++r) {
        sums.of_row[r] = row_sum(weights.at(r), x.numbers, x.block(0));
    }
    add_integers(sums.added(), weights.halves(208), x.block(0), out);
}

// Scales and minima of Q5_K, which have 6 bits there, as 16 bits each
struct scales_and_minima {
    __m256i scales; // twice
    __m128i minima;

    explicit scales_and_minima(const uint8_t * twelve) {
        const auto a = load<uint32_t>(twelve), b = load<uint32_t>(twelve + 4), c = load<uint32_t>(twelve + 8);
        const auto eight = [](uint32_t first, uint32_t low) {
            const uint32_t last = (low & 0x0f0f0f0f) | (first >> 2 & 0x30303030);
            return _mm_cvtepi8_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(uint64_t{last} << 32 | (first & 0x3f3f3f3f))));
        };
        scales = _mm256_broadcastsi128_si256(eight(a, c));
        minima = eight(b, c >> 4);
    }
};

// Q5_K: 256 numbers of 5 bits
inline __m256i row_sum(const uint8_t * block, const uint8_t * x, __m256i scales) {
    const __m256i high = load<__m256i>(block + 16);
    __m256i sum = {};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) { // 32 numbers, and the next 32
        const auto fifths = [&](int bit) {
            return masked(bit < 4 ? _mm256_slli_epi16(high, 4 - bit) : _mm256_srli_epi16(high, bit - 4), 0x10);
        };
        const __m256i both = load<__m256i>(block + 48 + i * 32);
        add_scaled(sum, masked(both, 0x0f) | fifths(2 * i), x + i * 64, two_of(scales, 2 * i, 2 * i));
        const __m256i next = masked(_mm256_srli_epi16(both, 4), 0x0f) | fifths(2 * i + 1);
        add_scaled(sum, next, x + i * 64 + 32, two_of(scales, 2 * i + 1, 2 * i + 1));
    }
    return sum;
}

template <>
inline void multiply_one<q5_k_weights>(const weight_rows & weights, const rounded_rows<rounded_256> & x, float * out) {
    row_sums sums;
    row_sums minima;
    const auto sums32 = load<__m128i>(x.block(0).sums32);
    for (uint32_t r = 0; r < LANES; ++r) {
        const scales_and_minima with(weights.at(r) + 4);
        sums.of_row[r] = row_sum(weights.at(r), x.numbers, with.scales);
        minima.of_row[r] = _mm256_zextsi128_si256(_mm_madd_epi16(with.minima, sums32));
    }
    const words both = weights.word(0);
    add_integers(minima.added(), -low_halves(both >> 16), x.block(0), out);
    add_integers(sums.added(), low_halves(both), x.block(0), out);
}

} // namespace in_256

} // namespace

} // namespace kvg::KVG_PRODUCTS
