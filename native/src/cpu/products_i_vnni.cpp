// Types in blocks of 256 whose numbers are indices into a codebook, on x86 with AVX-512 VNNI.
#ifdef __x86_64__
#include "cpu/codebooks.h"
#include "cpu/vnni_256.inl"

namespace kvg::products_vnni {

namespace {

const codebooks * books; // set before any of these kernels runs

constexpr uint32_t GROUPS = BLOCK / 64;

// W::row(block, to) unpacks a row's block into to[0], to[TILE] and so on, 64 numbers each. It is a function of its own: inlined, indices would
// go through vector registers.
template <class W, class F> inline void turn_rows(const weight_rows & rows, F to) {
    __m512i numbers[GROUPS][TILE];
    for (uint32_t i = 0; i < TILE; ++i) {
        W::row(rows.at(i), &numbers[0][i]);
    }
#pragma GCC unroll 4
    for (uint32_t group = 0; group < GROUPS; ++group) {
        transpose(numbers[group]);
#pragma GCC unroll 16
        for (uint32_t j = 0; j < 16; ++j) {
            to(group * 16 + j, numbers[group][j]);
        }
    }
}

// 64 numbers of 8 indices
template <class I, size_t N> inline __m512i looked_up(const std::array<uint64_t, N> & book, const I * index) {
    const auto four = [&](const I * i) {
        const auto at = [&](uint32_t k) { return static_cast<int64_t>(book[i[k]]); };
        return _mm256_setr_epi64x(at(0), at(1), at(2), at(3));
    };
    return joined(four(index), four(index + 4));
}
// and of 16
template <class I, size_t N> inline __m512i looked_up(const std::array<uint32_t, N> & book, const I * index) {
    const auto eight = [&](const I * i) {
        const auto at = [&](uint32_t k) { return static_cast<int32_t>(book[i[k]]); };
        return _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
    };
    return joined(eight(index), eight(index + 8));
}

// Indices of 16 bits of a row's block.
struct indices {
    alignas(64) uint16_t at[64];

    void set(uint32_t first, __m512i of_32) { _mm512_store_si512(at + first, of_32); }
};

inline __m512i words_of_bytes(const uint8_t * from) { return _mm512_cvtepu8_epi16(load_256(from)); }

// Each of 8 integers of 16 bits, four times
inline __m512i of_fours(__m512i eight) {
    const __m512i lowest = _mm512_set4_epi32(0x09080908, 0x09080908, 0x01000100, 0x01000100);
    return _mm512_shuffle_epi8(eight, lowest);
}

// 256 signs
struct signs {
    alignas(32) uint64_t of[GROUPS];

    // Of 32 times 7 signs, a byte each: an eighth makes the number of minuses even.
    explicit signs(__m256i sevens) {
        __m256i parity = _mm256_xor_si256(sevens, _mm256_srli_epi32(sevens, 4)); // in the lowest bit of each byte, in the end
        parity = _mm256_xor_si256(parity, _mm256_srli_epi32(parity, 2));
        parity = _mm256_xor_si256(parity, _mm256_srli_epi32(parity, 1));
        const __m256i eighth = _mm256_and_si256(_mm256_slli_epi32(parity, 7), _mm256_set1_epi8(static_cast<char>(0x80)));
        _mm256_store_si256(reinterpret_cast<__m256i *>(of), _mm256_or_si256(sevens, eighth));
    }
};

// 4 times 7 bits of words, in a byte each
inline __m256i sevens_of_words(__m256i words) {
    const auto seven = [&](int i) { return _mm256_and_si256(_mm256_slli_epi32(words, i), _mm256_set1_epi32(0x7f << (8 * i))); };
    return _mm256_or_si256(_mm256_or_si256(seven(0), seven(1)), _mm256_or_si256(seven(2), seven(3)));
}

// Bytes that are raised by 64 become what they are with these signs.
inline __m512i with_signs(__m512i sizes, uint64_t signs) { return _mm512_mask_sub_epi8(sizes, signs, bytes(128), sizes); }

// 2 n + 1 of `n_bits` bits
inline __m512i odd(__m512i lanes, uint32_t shift, int32_t mask) {
    const __m512i n = _mm512_and_si512(_mm512_srli_epi32(lanes, shift), _mm512_set1_epi32(mask));
    return _mm512_add_epi32(_mm512_add_epi32(n, n), _mm512_set1_epi32(1));
}

// An F16 times a power of two
inline void scale_by(tile & to, const weight_rows & rows, float power) {
    to.scale = _mm512_mul_ps(rows.halves(0), _mm512_set1_ps(power));
}

// An F16; of each 32 numbers 4 indices of 8 bits, 4 times 7 signs and a scale of 4 bits: (2 scale + 1) / 8
struct iq2_xxs_weights {
    static constexpr size_t BYTES = 66;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool MINIMA = false;

    static void scales(tile & to, const weight_rows & rows) {
        scale_by(to, rows, 0.125f);
        for (uint32_t i = 0; i < 4; ++i) {
            __m512i words[4];
            rows.words(2 + i * 16, words);
            to.scales[2 * i] = odd(words[1], 28, 15);
            to.scales[2 * i + 1] = odd(words[3], 28, 15);
        }
        lower<PER_SCALE>(to, 6);
    }
    template <class F> static void numbers(const weight_rows & rows, F to) { turn_rows<iq2_xxs_weights>(rows, to); }
    [[gnu::noinline]] static void row(const uint8_t * block, __m512i * to) {
        const __m512i both = _mm512_loadu_si512(block + 2); // four indices, then signs
        const signs minus(sevens_of_words(_mm512_cvtepi64_epi32(_mm512_srli_epi64(both, 32))));
        for (uint32_t group = 0; group < GROUPS; ++group) {
            const uint8_t * at = block + 2 + group * 16;
            const uint8_t index[8] = {at[0], at[1], at[2], at[3], at[8], at[9], at[10], at[11]};
            to[group * TILE] = with_signs(looked_up(books->iq2_xxs, index), minus.of[group]);
        }
    }
};

// 16 scales of 4 bits in 8 bytes: (2 scale + 1) / 8
inline void unpack_sixteen(tile & to, const weight_rows & rows, size_t offset) {
    scale_by(to, rows, 0.125f);
    for (uint32_t i = 0; i < 2; ++i) {
        const __m512i word = rows.word(offset + 4 * i);
        for (uint32_t j = 0; j < 8; ++j) {
            to.scales[i * 8 + j] = odd(word, 4 * j, 15);
        }
    }
    lower<16>(to, 6);
}

// An F16; 32 times 9 bits of an index and 7 signs; 16 scales
struct iq2_xs_weights {
    static constexpr size_t BYTES = 74;
    static constexpr uint32_t PER_SCALE = 16;
    static constexpr bool MINIMA = false;

    static void scales(tile & to, const weight_rows & rows) { unpack_sixteen(to, rows, 66); }
    template <class F> static void numbers(const weight_rows & rows, F to) { turn_rows<iq2_xs_weights>(rows, to); }
    [[gnu::noinline]] static void row(const uint8_t * block, __m512i * to) {
        const __m512i both = _mm512_loadu_si512(block + 2);
        const signs minus(_mm512_cvtepi16_epi8(_mm512_srli_epi16(both, 9)));
        indices index;
        index.set(0, _mm512_and_si512(both, _mm512_set1_epi16(0x01ff)));
        for (uint32_t group = 0; group < GROUPS; ++group) {
            to[group * TILE] = with_signs(looked_up(books->iq2_xs, index.at + group * 8), minus.of[group]);
        }
    }
};

// An F16; lower bytes of 32 indices; 256 signs; 2 upper bits of each index; 16 scales
struct iq2_s_weights {
    static constexpr size_t BYTES = 82;
    static constexpr uint32_t PER_SCALE = 16;
    static constexpr bool MINIMA = false;

    static void scales(tile & to, const weight_rows & rows) { unpack_sixteen(to, rows, 74); }
    template <class F> static void numbers(const weight_rows & rows, F to) { turn_rows<iq2_s_weights>(rows, to); }
    [[gnu::noinline]] static void row(const uint8_t * block, __m512i * to) {
        const __m512i eight = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(block + 66)));
        const __m512i moved = _mm512_sllv_epi16(of_fours(eight), _mm512_set1_epi64(0x0002000400060008));
        const __m512i above = _mm512_and_si512(moved, _mm512_set1_epi16(0x0300));
        indices index;
        index.set(0, _mm512_or_si512(words_of_bytes(block + 2), above));
        for (uint32_t group = 0; group < GROUPS; ++group) {
            to[group * TILE] =
                with_signs(looked_up(books->iq2_s, index.at + group * 8), load<uint64_t>(block + 34 + group * 8));
        }
    }
};

// An F16; 64 indices of 8 bits; of each 32 numbers 4 times 7 signs and a scale of 4 bits: (2 scale + 1) / 4
struct iq3_xxs_weights {
    static constexpr size_t BYTES = 98;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool MINIMA = false;

    static void scales(tile & to, const weight_rows & rows) {
        scale_by(to, rows, 0.25f);
        __m512i words[8];
        rows.words(66, words);
        rows.words(82, words + 4);
        for (uint32_t i = 0; i < 8; ++i) {
            to.scales[i] = odd(words[i], 28, 15);
        }
        lower<PER_SCALE>(to, 6);
    }
    template <class F> static void numbers(const weight_rows & rows, F to) { turn_rows<iq3_xxs_weights>(rows, to); }
    [[gnu::noinline]] static void row(const uint8_t * block, __m512i * to) {
        const signs minus(sevens_of_words(load_256(block + 66)));
        for (uint32_t group = 0; group < GROUPS; ++group) {
            to[group * TILE] = with_signs(looked_up(books->iq3_xxs, block + 2 + group * 16), minus.of[group]);
        }
    }
};

// An F16; lower bytes of 64 indices, then their upper bits; 256 signs; 8 scales of 4 bits: 2 scale + 1
struct iq3_s_weights {
    static constexpr size_t BYTES = 110;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool MINIMA = false;

    static void scales(tile & to, const weight_rows & rows) {
        to.scale = rows.halves(0);
        const __m512i word = rows.word(106);
        for (uint32_t i = 0; i < 8; ++i) {
            to.scales[i] = odd(word, 4 * i, 15);
        }
        lower<PER_SCALE>(to, 6);
    }
    template <class F> static void numbers(const weight_rows & rows, F to) { turn_rows<iq3_s_weights>(rows, to); }
    [[gnu::noinline]] static void row(const uint8_t * block, __m512i * to) {
        indices index;
        for (uint32_t half = 0; half < 2; ++half) {
            const __m512i low = words_of_bytes(block + 2 + half * 32);
            const __mmask32 high = load<uint32_t>(block + 66 + half * 4);
            index.set(half * 32, _mm512_mask_add_epi16(low, high, low, _mm512_set1_epi16(0x0100)));
        }
        for (uint32_t group = 0; group < GROUPS; ++group) {
            to[group * TILE] =
                with_signs(looked_up(books->iq3_s, index.at + group * 16), load<uint64_t>(block + 74 + group * 8));
        }
    }
};

// 8 times 8 numbers of IQ1, which are an eighth more, or an eighth less where it is set.
inline __m512i moved_by_eighth(__m512i numbers, __mmask8 less) {
    return _mm512_add_epi8(numbers, _mm512_mask_blend_epi64(less, bytes(1), bytes(0xff)));
}

// An F16; lower bytes of 32 indices; of each 32 numbers 4 times 3 bits above, a scale of 3 bits, and a bit of where they are: 2 scale + 1
struct iq1_s_weights {
    static constexpr size_t BYTES = 50;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool MINIMA = false;

    static void scales(tile & to, const weight_rows & rows) {
        scale_by(to, rows, 0.125f);
        __m512i words[4];
        rows.words(34, words);
        for (uint32_t i = 0; i < 8; ++i) {
            to.scales[i] = odd(words[i / 2], 12 + i % 2 * 16, 7);
        }
        lower<PER_SCALE>(to, 4);
    }
    template <class F> static void numbers(const weight_rows & rows, F to) { turn_rows<iq1_s_weights>(rows, to); }
    [[gnu::noinline]] static void row(const uint8_t * block, __m512i * to) {
        const __m512i eight = _mm512_cvtepu16_epi64(load_128(block + 34));
        const __m512i high = of_fours(eight);
        const __m512i three =
            _mm512_and_si512(_mm512_srlv_epi16(high, _mm512_set1_epi64(0x0009000600030000)), _mm512_set1_epi16(7));
        indices index;
        index.set(0, _mm512_or_si512(words_of_bytes(block + 2), _mm512_slli_epi16(three, 8)));
        const __mmask32 less = _mm512_movepi16_mask(high);
        for (uint32_t group = 0; group < GROUPS; ++group) {
            const auto less_here = static_cast<__mmask8>(less >> (8 * group));
            to[group * TILE] = moved_by_eighth(looked_up(books->iq1, index.at + group * 8), less_here);
        }
    }
};

// Lower bytes of 32 indices; of each 3 bits above, and a bit of where its numbers are; four times 12 bits of 4 scales and 4 of an F16
struct iq1_m_weights {
    static constexpr size_t BYTES = 56;
    static constexpr uint32_t PER_SCALE = 16;
    static constexpr bool MINIMA = false;

    static void scales(tile & to, const weight_rows & rows) {
        const __m512i words[2] = {rows.word(48), rows.word(52)};
        const auto nibble = [&](uint32_t i, uint32_t shift, int32_t mask) {
            return _mm512_and_si512(_mm512_srli_epi32(words[i], shift), _mm512_set1_epi32(mask));
        };
        const __m512i half = _mm512_or_si512(_mm512_or_si512(nibble(0, 12, 0x000f), nibble(0, 24, 0x00f0)),
                                             _mm512_or_si512(nibble(1, 4, 0x0f00), nibble(1, 16, 0xf000)));
        to.scale = _mm512_mul_ps(low_halves(half), _mm512_set1_ps(0.125f));
        for (uint32_t i = 0; i < 16; ++i) {
            to.scales[i] = odd(words[i / 8], i / 4 % 2 * 16 + i % 4 * 3, 7);
        }
        lower<PER_SCALE>(to, 4);
    }
    template <class F> static void numbers(const weight_rows & rows, F to) { turn_rows<iq1_m_weights>(rows, to); }
    [[gnu::noinline]] static void row(const uint8_t * block, __m512i * to) {
        const __m512i sixteen = _mm512_cvtepu8_epi32(load_128(block + 32));
        const __m512i high = _mm512_or_si512(sixteen, _mm512_slli_epi32(sixteen, 12)); // 4 bits in each half
        const __m512i three = _mm512_and_si512(high, _mm512_set1_epi16(7));
        indices index;
        index.set(0, _mm512_or_si512(words_of_bytes(block), _mm512_slli_epi16(three, 8)));
        const __mmask32 less = _mm512_test_epi16_mask(high, _mm512_set1_epi16(8));
        for (uint32_t group = 0; group < GROUPS; ++group) {
            const auto less_here = static_cast<__mmask8>(less >> (8 * group));
            to[group * TILE] = moved_by_eighth(looked_up(books->iq1, index.at + group * 8), less_here);
        }
    }
};

template <class W> void run_with_books(const product_job & job, uint32_t begin, uint32_t end) {
    books = &all_codebooks();
    run<W>(job, begin, end);
}

} // namespace

extern const product_kernel iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s, iq1_s, iq1_m;
const product_kernel iq2_xxs = {by_256, run_with_books<iq2_xxs_weights>};
const product_kernel iq2_xs = {by_256, run_with_books<iq2_xs_weights>};
const product_kernel iq2_s = {by_256, run_with_books<iq2_s_weights>};
const product_kernel iq3_xxs = {by_256, run_with_books<iq3_xxs_weights>};
const product_kernel iq3_s = {by_256, run_with_books<iq3_s_weights>};
const product_kernel iq1_s = {by_256, run_with_books<iq1_s_weights>};
const product_kernel iq1_m = {by_256, run_with_books<iq1_m_weights>};

} // namespace kvg::products_vnni
#endif
