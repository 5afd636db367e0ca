// Types in blocks of 256 whose numbers are indices into a codebook, on x86 with AVX-512 VNNI, and with AMX.
#ifdef __x86_64__
#include "cpu/codebooks.h"
#include "cpu/vnni_256.inl"
#include "cpu/vnni_kernels.h"

#include "cpu/amx_256.inl"

namespace kvg::products_vnni {

namespace {

const codebooks * books; // set before any of these kernels runs

// 64 numbers of 8 indices, by fours
template <class I, size_t N> inline __m512i looked_up(const std::array<uint64_t, N> & book, const I * index, const I * others) {
    const auto at = [&](I i) { return static_cast<int64_t>(book[i]); };
    const auto four = [&](const I * i) { return _mm256_setr_epi64x(at(i[0]), at(i[1]), at(i[2]), at(i[3])); };
    return joined(four(index), four(others));
}
// Of 32 indices of 8 bits in 16 each: 16 bits of a book with 256 entries. It is read whole, 64 entries at a time, which is faster than
// to read as many entries one by one. Books of IQ2, with 8 weights an entry, are read one by one: there it is not.
inline __m512i looked_up(const uint16_t * book, __m512i index) {
    const auto of_64 = [&](size_t i) {
        return _mm512_permutex2var_epi16(_mm512_load_si512(book + i * 64), index, _mm512_load_si512(book + i * 64 + 32));
    };
    const __mmask32 seventh = _mm512_test_epi16_mask(index, _mm512_set1_epi16(0x40));
    const __mmask32 eighth = _mm512_test_epi16_mask(index, _mm512_set1_epi16(0x80));
    const auto of_128 = [&](size_t i) { return _mm512_mask_mov_epi16(of_64(i), seventh, of_64(i + 1)); };
    return _mm512_mask_mov_epi16(of_128(0), eighth, of_128(2));
}

// What a row's block is unpacked by. These numbers are in memory a while before they are read one by one: read at once, they would be taken
// out of vectors, which is slow.
struct indices_and_signs {
    alignas(64) uint16_t index[64];
    alignas(32) uint64_t signs[GROUPS];
    alignas(32) int16_t scales[16];

    __m256i all_scales() const { return _mm256_load_si256(reinterpret_cast<const __m256i *>(scales)); }
    void set(uint32_t first, __m512i of_32) { _mm512_store_si512(index + first, of_32); }
    const uint8_t * bytes() const { return reinterpret_cast<const uint8_t *>(index); } // where they have 8 bits
    // Of 32 times 7 signs, a byte each: an eighth makes the number of minuses even.
    void set_signs(__m256i sevens) {
        __m256i parity = _mm256_xor_si256(sevens, _mm256_srli_epi32(sevens, 4)); // in the lowest bit of each byte, in the end
        parity = _mm256_xor_si256(parity, _mm256_srli_epi32(parity, 2));
        parity = _mm256_xor_si256(parity, _mm256_srli_epi32(parity, 1));
        const __m256i eighth = _mm256_and_si256(_mm256_slli_epi32(parity, 7), _mm256_set1_epi8(static_cast<char>(0x80)));
        _mm256_store_si256(reinterpret_cast<__m256i *>(signs), _mm256_or_si256(sevens, eighth));
    }
    // 2 n + 1 of 8 integers of 16 bits, or of 8 or 16 of 8 bits
    void set_odd(__m128i n) {
        _mm_store_si128(reinterpret_cast<__m128i *>(scales), _mm_add_epi16(_mm_add_epi16(n, n), _mm_set1_epi16(1)));
    }
    void set_odd(uint64_t first) { set_odd(_mm_cvtepu8_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(first)))); }
    void set_odd(uint64_t first, uint64_t second) {
        const __m256i n = _mm256_cvtepu8_epi16(_mm_set_epi64x(static_cast<int64_t>(second), static_cast<int64_t>(first)));
        _mm256_store_si256(reinterpret_cast<__m256i *>(scales), _mm256_add_epi16(_mm256_add_epi16(n, n), _mm256_set1_epi16(1)));
    }
};

// For IQ3
struct numbers_and_signs : indices_and_signs {
    alignas(64) uint8_t numbers[BLOCK];

    __m512i group(uint32_t i) const { return _mm512_load_si512(numbers + i * 64); }
    // Of 32 indices, from number `first` on. sizes: four times 4 bits in each 16; number(v): what the lower 4 bits of bytes stand for
    template <class F> void set_numbers(uint32_t first, __m512i sizes, F number) {
        const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); // one vector gets the first halves of each 128 bits
        const __m512i turned = _mm512_permutexvar_epi64(order, sizes);
        const __m512i even = number(turned);
        const __m512i odd = number(_mm512_srli_epi16(turned, 4));
        _mm512_store_si512(numbers + first, _mm512_unpacklo_epi8(even, odd));
        _mm512_store_si512(numbers + first + 64, _mm512_unpackhi_epi8(even, odd));
    }
};

inline __m512i words_of_bytes(const uint8_t * from) { return _mm512_cvtepu8_epi16(load_256(from)); }

// Each of 8 integers of 16 bits, four times
inline __m512i of_fours(__m512i eight) {
    const __m512i lowest = _mm512_set4_epi32(0x09080908, 0x09080908, 0x01000100, 0x01000100);
    return _mm512_shuffle_epi8(eight, lowest);
}

// 4 times 7 bits of words, in a byte each
inline __m256i sevens_of_words(__m256i words) {
    const auto seven = [&](int i) { return _mm256_and_si256(_mm256_slli_epi32(words, i), _mm256_set1_epi32(0x7f << (8 * i))); };
    return _mm256_or_si256(_mm256_or_si256(seven(0), seven(1)), _mm256_or_si256(seven(2), seven(3)));
}

// Bytes that are raised by 64 become what they are with these signs.
inline __m512i with_signs(__m512i sizes, uint64_t signs) { return _mm512_mask_sub_epi8(sizes, signs, bytes(128), sizes); }

// 8 times 4 or 3 bits, in a byte each
inline uint64_t nibbles(uint32_t packed) { return _pdep_u64(packed, 0x0f0f0f0f0f0f0f0f); }
inline uint64_t threes(uint64_t packed) { return _pdep_u64(packed, 0x0707070707070707); }

// An F16 times a power of two
inline __m512 scaled(const weight_rows & rows, float power) { return _mm512_mul_ps(rows.halves(0), _mm512_set1_ps(power)); }

// An F16; of each 32 numbers 4 indices of 8 bits, 4 times 7 signs and a scale of 4 bits: (2 scale + 1) / 8
struct iq2_xxs_weights {
    static constexpr size_t BYTES = 66;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool MINIMA = false;
    static constexpr uint32_t RAISED = 6;
    static constexpr bool IN_ORDER = false;

    static __m512 scale(const weight_rows & rows) { return scaled(rows, 0.125f); }
    using of_row = indices_and_signs;
    static __m256i scales(const uint8_t *, const of_row & row) { return row.all_scales(); }
    static void prepare(const uint8_t * block, of_row & to) {
        const __m512i both = _mm512_loadu_si512(block + 2); // four indices, then signs
        to.set_signs(sevens_of_words(_mm512_cvtepi64_epi32(_mm512_srli_epi64(both, 32))));
        to.set(0, both);
        to.set_odd(_mm512_cvtepi64_epi16(_mm512_srli_epi64(both, 60)));
    }
    static __m512i group(const uint8_t *, const of_row & row, uint32_t i) {
        const uint8_t * index = row.bytes() + i * 16;
        return with_signs(looked_up(books->iq2_xxs, index, index + 8), row.signs[i]);
    }
};

// An F16; 32 times 9 bits of an index and 7 signs; 16 scales
struct iq2_xs_weights {
    static constexpr size_t BYTES = 74;
    static constexpr uint32_t PER_SCALE = 16;
    static constexpr bool MINIMA = false;
    static constexpr uint32_t RAISED = 6;
    static constexpr bool IN_ORDER = false;

    static __m512 scale(const weight_rows & rows) { return scaled(rows, 0.125f); }
    using of_row = indices_and_signs;
    static __m256i scales(const uint8_t *, const of_row & row) { return row.all_scales(); }
    static void prepare(const uint8_t * block, of_row & to) {
        const __m512i both = _mm512_loadu_si512(block + 2);
        to.set_signs(_mm512_cvtepi16_epi8(_mm512_srli_epi16(both, 9)));
        to.set(0, _mm512_and_si512(both, _mm512_set1_epi16(0x01ff)));
        to.set_odd(nibbles(load<uint32_t>(block + 66)), nibbles(load<uint32_t>(block + 70)));
    }
    static __m512i group(const uint8_t *, const of_row & row, uint32_t i) {
        return with_signs(looked_up(books->iq2_xs, row.index + i * 8, row.index + i * 8 + 4), row.signs[i]);
    }
};

// An F16; lower bytes of 32 indices; 256 signs; 2 upper bits of each index; 16 scales
struct iq2_s_weights {
    static constexpr size_t BYTES = 82;
    static constexpr uint32_t PER_SCALE = 16;
    static constexpr bool MINIMA = false;
    static constexpr uint32_t RAISED = 6;
    static constexpr bool IN_ORDER = false;

    static __m512 scale(const weight_rows & rows) { return scaled(rows, 0.125f); }
    using of_row = indices_and_signs;
    static __m256i scales(const uint8_t *, const of_row & row) { return row.all_scales(); }
    static void prepare(const uint8_t * block, of_row & to) {
        const __m512i eight = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(block + 66)));
        const __m512i moved = _mm512_sllv_epi16(of_fours(eight), _mm512_set1_epi64(0x0002000400060008));
        const __m512i above = _mm512_and_si512(moved, _mm512_set1_epi16(0x0300));
        to.set(0, _mm512_or_si512(words_of_bytes(block + 2), above));
        to.set_odd(nibbles(load<uint32_t>(block + 74)), nibbles(load<uint32_t>(block + 78)));
    }
    static __m512i group(const uint8_t * block, const of_row & row, uint32_t i) {
        return with_signs(looked_up(books->iq2_s, row.index + i * 8, row.index + i * 8 + 4),
                          load<uint64_t>(block + 34 + i * 8));
    }
};

// An F16; 64 indices of 8 bits; of each 32 numbers 4 times 7 signs and a scale of 4 bits: (2 scale + 1) / 4
struct iq3_xxs_weights {
    static constexpr size_t BYTES = 98;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool MINIMA = false;
    static constexpr uint32_t RAISED = 6;
    static constexpr bool IN_ORDER = false;

    static __m512 scale(const weight_rows & rows) { return scaled(rows, 0.25f); }
    using of_row = numbers_and_signs;
    static __m256i scales(const uint8_t *, const of_row & row) { return row.all_scales(); }
    static void prepare(const uint8_t * block, of_row & to) {
        to.set_signs(sevens_of_words(load_256(block + 66)));
        const __m512i sizes = _mm512_broadcast_i32x4(load_128(books->iq3_xxs_sizes.data()));
        for (uint32_t half = 0; half < 2; ++half) {
            const __m512i numbers = looked_up(books->iq3_xxs_fours.data(), words_of_bytes(block + 2 + half * 32));
            to.set_numbers(half * 128, numbers,
                           [&](__m512i v) { return _mm512_shuffle_epi8(sizes, _mm512_and_si512(v, bytes(0x0f))); });
        }
        to.set_odd(_mm256_cvtepi32_epi16(_mm256_srli_epi32(load_256(block + 66), 28)));
    }
    static __m512i group(const uint8_t *, const of_row & row, uint32_t i) { return with_signs(row.group(i), row.signs[i]); }
};

// An F16; lower bytes of 64 indices, then their upper bits; 256 signs; 8 scales of 4 bits: 2 scale + 1
struct iq3_s_weights {
    static constexpr size_t BYTES = 110;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool MINIMA = false;
    static constexpr uint32_t RAISED = 6;
    static constexpr bool IN_ORDER = false;

    static __m512 scale(const weight_rows & rows) { return rows.halves(0); }
    using of_row = numbers_and_signs;
    static __m256i scales(const uint8_t *, const of_row & row) { return row.all_scales(); }
    static void prepare(const uint8_t * block, of_row & to) {
        for (uint32_t half = 0; half < 2; ++half) {
            const __m512i index = words_of_bytes(block + 2 + half * 32);
            const uint16_t * book = books->iq3_s_fours.data();
            const __mmask32 ninth = load<uint32_t>(block + 66 + half * 4);
            const __m512i sizes = _mm512_mask_mov_epi16(looked_up(book, index), ninth, looked_up(book + 256, index));
            to.set_numbers(half * 128, sizes, [](__m512i v) {
                return _mm512_ternarylogic_epi32(v, bytes(0x0f), bytes(0x40), 0xea); // (v & 0x0f) | 0x40
            });
        }
        to.set_odd(nibbles(load<uint32_t>(block + 106)));
    }
    static __m512i group(const uint8_t * block, const of_row & row, uint32_t i) {
        return with_signs(row.group(i), load<uint64_t>(block + 74 + i * 8));
    }
};

// 64 numbers of IQ1: eight are an eighth more, or an eighth less where their bit is set.
inline __m512i of_iq1(const indices_and_signs & row, uint32_t i) {
    const auto less = static_cast<__mmask8>(row.signs[0] >> (8 * i));
    return _mm512_add_epi8(looked_up(books->iq1, row.index + i * 8, row.index + i * 8 + 4),
                           _mm512_mask_blend_epi64(less, bytes(1), bytes(0xff)));
}

// An F16; lower bytes of 32 indices; of each 32 numbers 4 times 3 bits above, a scale of 3 bits, and a bit of where they are: 2 scale + 1
struct iq1_s_weights {
    static constexpr size_t BYTES = 50;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool MINIMA = false;
    static constexpr uint32_t RAISED = 4;
    static constexpr bool IN_ORDER = false;

    static __m512 scale(const weight_rows & rows) { return scaled(rows, 0.125f); }
    using of_row = indices_and_signs;
    static __m256i scales(const uint8_t *, const of_row & row) { return row.all_scales(); }
    static void prepare(const uint8_t * block, of_row & to) {
        const __m512i eight = _mm512_cvtepu16_epi64(load_128(block + 34));
        const __m512i high = of_fours(eight);
        const __m512i three =
            _mm512_and_si512(_mm512_srlv_epi16(high, _mm512_set1_epi64(0x0009000600030000)), _mm512_set1_epi16(7));
        to.set(0, _mm512_or_si512(words_of_bytes(block + 2), _mm512_slli_epi16(three, 8)));
        to.signs[0] = _mm512_movepi16_mask(high);
        to.set_odd(_mm_and_si128(_mm_srli_epi16(load_128(block + 34), 12), _mm_set1_epi16(7)));
    }
    static __m512i group(const uint8_t *, const of_row & row, uint32_t i) { return of_iq1(row, i); }
};

// Lower bytes of 32 indices; of each 3 bits above, and a bit of where its numbers are; four times 12 bits of 4 scales and 4 of an F16
struct iq1_m_weights {
    static constexpr size_t BYTES = 56;
    static constexpr uint32_t PER_SCALE = 16;
    static constexpr bool MINIMA = false;
    static constexpr uint32_t RAISED = 4;
    static constexpr bool IN_ORDER = false;

    static __m512 scale(const weight_rows & rows) {
        const __m512i words[2] = {rows.word(48), rows.word(52)};
        const auto nibble = [&](uint32_t i, uint32_t shift, int32_t mask) {
            return _mm512_and_si512(_mm512_srli_epi32(words[i], shift), _mm512_set1_epi32(mask));
        };
        const __m512i half = _mm512_or_si512(_mm512_or_si512(nibble(0, 12, 0x000f), nibble(0, 24, 0x00f0)),
                                             _mm512_or_si512(nibble(1, 4, 0x0f00), nibble(1, 16, 0xf000)));
        return _mm512_mul_ps(low_halves(half), _mm512_set1_ps(0.125f));
    }
    using of_row = indices_and_signs;
    static __m256i scales(const uint8_t *, const of_row & row) { return row.all_scales(); }
    static void prepare(const uint8_t * block, of_row & to) {
        const __m512i sixteen = _mm512_cvtepu8_epi32(load_128(block + 32));
        const __m512i high = _mm512_or_si512(sixteen, _mm512_slli_epi32(sixteen, 12)); // 4 bits in each half
        const __m512i three = _mm512_and_si512(high, _mm512_set1_epi16(7));
        to.set(0, _mm512_or_si512(words_of_bytes(block), _mm512_slli_epi16(three, 8)));
        to.signs[0] = _mm512_test_epi16_mask(high, _mm512_set1_epi16(8));
        const uint64_t scales = _pext_u64(load<uint64_t>(block + 48), 0x0fff0fff0fff0fff);
        to.set_odd(threes(scales), threes(scales >> 24));
    }
    static __m512i group(const uint8_t *, const of_row & row, uint32_t i) { return of_iq1(row, i); }
};

template <void (*RUN)(const product_job &, uint32_t, uint32_t)>
void with_books(const product_job & job, uint32_t begin, uint32_t end) {
    books = &all_codebooks();
    RUN(job, begin, end);
}

template <class W> constexpr product_kernel by_vnni = {by_256, with_books<run<W>>};
template <class W> constexpr product_kernel by_amx = {by_256, with_books<run_by_amx<W>>};
template <class W> constexpr type_kernels kernels_of = {&by_vnni<W>, &by_amx<W>};

} // namespace

const type_kernels iq2_xxs = kernels_of<iq2_xxs_weights>;
const type_kernels iq2_xs = kernels_of<iq2_xs_weights>;
const type_kernels iq2_s = kernels_of<iq2_s_weights>;
const type_kernels iq3_xxs = kernels_of<iq3_xxs_weights>;
const type_kernels iq3_s = kernels_of<iq3_s_weights>;
const type_kernels iq1_s = kernels_of<iq1_s_weights>;
const type_kernels iq1_m = kernels_of<iq1_m_weights>;

} // namespace kvg::products_vnni
#endif
