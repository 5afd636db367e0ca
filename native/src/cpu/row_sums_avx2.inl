// Products of one row of floats with Q4_K, Q5_K and Q6_K weights on AVX2. Elsewhere weights are turned first, so that each lane has a row. Here
// turning takes longer than the products, and 16 rows are read at a time, which a CPU doesn't fetch ahead. So each row of weights is
// multiplied as it lies, one behind the other, and 8 rows' sums are turned at the end. The sums of integers are the same either way, and
// floats are added in the same order. Included behind types_256.inl.

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
// Adds the products of 32 weights and 32 rounded floats, times the weights' scales.
inline void add_scaled(__m256i & sum, __m256i numbers, const uint8_t * x, __m256i scales) {
    const __m256i pairs = _mm256_maddubs_epi16(numbers, load<__m256i>(x));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, scales));
}

// How blocks of a type are multiplied as they lie:
//   SCALE      where the scale of all of a block is; with MINIMA that of minima follows it
//   sum(...)   8 integers, whose sum is that of a block's numbers times their scales; with MINIMA those of minima, too
template <class W> struct as_it_lies;

struct with_minima {
    __m256i numbers;
    __m256i minima; // times the row's sums
};

template <> struct as_it_lies<q6_k_weights> {
    static constexpr size_t SCALE = 208;

    static __m256i sum(const uint8_t * block, const uint8_t * x, const rounded_256 & row) {
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
                const __m256i near = masked(both, 0x0f) | shifted(high, 4 - 2 * k, 0x30);
                add_scaled(sum, near, at, two_of(eight, 2 * k, 2 * k + 1));
                const __m256i far = shifted(both, -4, 0x0f) | shifted(high, -2 * k, 0x30);
                add_scaled(sum, far, at + 64, two_of(eight, 2 * k + 4, 2 * k + 5));
            }
        }
        return sum;
    }
};

// Of Q4_K and Q5_K: 8 scales and 8 minima of 6 bits
struct six_bits {
    static constexpr size_t SCALE = 0;

    // As 16 bits each. first: the first four, and upper bits of the others. low: their lower halves
    static __m128i eight(uint32_t first, uint32_t low) {
        const uint32_t last = (low & 0x0f0f0f0f) | (first >> 2 & 0x30303030);
        return _mm_cvtepi8_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(uint64_t{last} << 32 | (first & 0x3f3f3f3f))));
    }
    static __m256i scales(const uint8_t * block) { // twice
        return _mm256_broadcastsi128_si256(eight(load<uint32_t>(block + 4), load<uint32_t>(block + 12)));
    }
    static __m256i minima(const uint8_t * block, const rounded_256 & row) {
        const __m128i all = eight(load<uint32_t>(block + 8), load<uint32_t>(block + 12) >> 4);
        return _mm256_zextsi128_si256(_mm_madd_epi16(all, load<__m128i>(row.sums32)));
    }
};

template <> struct as_it_lies<q4_k_weights> : six_bits {
    static with_minima sum(const uint8_t * block, const uint8_t * x, const rounded_256 & row) {
        const __m256i by = scales(block);
        __m256i sum = {};
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) { // 32 numbers, and the next 32
            const __m256i both = load<__m256i>(block + 16 + i * 32);
            add_scaled(sum, masked(both, 0x0f), x + i * 64, two_of(by, 2 * i, 2 * i));
            add_scaled(sum, shifted(both, -4, 0x0f), x + i * 64 + 32, two_of(by, 2 * i + 1, 2 * i + 1));
        }
        return {sum, minima(block, row)};
    }
};

template <> struct as_it_lies<q5_k_weights> : six_bits {
    static with_minima sum(const uint8_t * block, const uint8_t * x, const rounded_256 & row) {
        const __m256i by = scales(block);
        const __m256i high = load<__m256i>(block + 16);
        __m256i sum = {};
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) { // 32 numbers, and the next 32
            const __m256i both = load<__m256i>(block + 48 + i * 32);
            const __m256i near = masked(both, 0x0f) | shifted(high, 4 - 2 * i, 0x10);
            add_scaled(sum, near, x + i * 64, two_of(by, 2 * i, 2 * i));
            const __m256i next = shifted(both, -4, 0x0f) | shifted(high, 3 - 2 * i, 0x10);
            add_scaled(sum, next, x + i * 64 + 32, two_of(by, 2 * i + 1, 2 * i + 1));
        }
        return {sum, minima(block, row)};
    }
};

// Rows lie behind one another, so this is what is read some rows later.
template <size_t N> [[gnu::always_inline]] inline void fetch_later(const uint8_t * block) {
    constexpr size_t LATER = 2048; // of 512, 1024, 2048 and 4096 the fastest on Zen 3
    for (size_t line = 0; line < N; line += 64) {
        __builtin_prefetch(block + LATER + line);
    }
}

// n blocks of LANES rows, from block `first` on
template <class W, uint32_t MOST>
inline void add_blocks(const weight_rows & weights, const rounded_rows<rounded_256> & x, uint32_t first, uint32_t n,
                       float * out) {
    using lies = as_it_lies<W>;
    row_sums sums[MOST];
    row_sums minima[W::MINIMA ? MOST : 1];
    for (uint32_t r = 0; r < LANES; ++r) {
        for (uint32_t b = 0; b < n; ++b) {
            const uint8_t * block = weights.at(r) + (first + b) * W::BYTES;
            const rounded_256 & row = x.block(0, first + b);
            fetch_later<W::BYTES>(block);
            const auto sum = lies::sum(block, x.numbers + (first + b) * BLOCK, row);
            if constexpr (W::MINIMA) {
                sums[b].of_row[r] = sum.numbers;
                minima[b].of_row[r] = sum.minima;
            } else {
                sums[b].of_row[r] = sum;
            }
        }
    }
    for (uint32_t b = 0; b < n; ++b) {
        const rounded_256 & row = x.block(0, first + b);
        const size_t at = (first + b) * W::BYTES + lies::SCALE;
        if constexpr (W::MINIMA) {
            const words both = weights.word(at);
            add_integers(minima[b].added(), -low_halves(both >> 16), row, out);
            add_integers(sums[b].added(), low_halves(both), row, out);
        } else {
            add_integers(sums[b].added(), weights.halves(at), row, out);
        }
    }
}

template <class W> constexpr bool READ_AS_IT_LIES<W, decltype(as_it_lies<W>::SCALE, void())> = true;

template <class W>
void multiply_as_it_lies(const weight_rows & weights, const rounded_rows<rounded_256> & x, uint32_t n_blocks, float * out) {
    constexpr uint32_t MOST = 16; // blocks of LANES rows, whose sums stay in L1
    for (uint32_t first = 0; first < n_blocks; first += MOST) {
        add_blocks<W, MOST>(weights, x, first, std::min(MOST, n_blocks - first), out);
    }
}

} // namespace in_256

} // namespace

} // namespace kvg::KVG_PRODUCTS
