// Types in blocks of 256 whose numbers are indices into a codebook. Included behind tiles_256.inl.
#include "cpu/codebooks.h"

namespace kvg::KVG_PRODUCTS {

namespace {

// 16 numbers of each row by 2 indices of 8 numbers: index(r, k) is row r's index k.
template <size_t N, class F> inline void look_up(const std::array<uint64_t, N> & book, F index, words * four) {
    typedef uint64_t two __attribute__((vector_size(16)));
    sixteen rows[LANES];
    for (size_t r = 0; r < LANES; ++r) {
        rows[r] = reinterpret_cast<sixteen>(two{book[index(r, 0)], book[index(r, 1)]});
    }
    turn(rows, four);
}
// or by 4 indices of 4
template <size_t N, class F> inline void look_up(const std::array<uint32_t, N> & book, F index, words * four) {
    sixteen rows[LANES];
    for (size_t r = 0; r < LANES; ++r) {
        rows[r] = sixteen{book[index(r, 0)], book[index(r, 1)], book[index(r, 2)], book[index(r, 3)]};
    }
    turn(rows, four);
}

// Indices of a block of LANES rows, of 16 bits each
template <uint32_t N> struct indices {
    uint16_t of_row[LANES][N];

    // set(block, to) writes the indices of one row.
    template <class F> indices(const weight_rows & rows, F set) {
        for (size_t r = 0; r < LANES; ++r) {
            set(rows.at(r), of_row[r]);
        }
    }
};

// Each index has a lower byte; above(i) has the bits above those of indices 4i to 4i + 3, where they belong.
template <uint32_t N, class F> inline void set_indices(uint16_t * to, const uint8_t * low, F above) {
    for (uint32_t i = 0; i < N / 4; ++i) {
        uint64_t four = load<uint32_t>(low + 4 * i);
        four = (four | four << 16) & 0x0000ffff0000ffff;
        four = (four | four << 8) & 0x00ff00ff00ff00ff;
        store(to + 4 * i, four | above(i));
    }
}

inline words sum_of_bytes(words a, words b) {
    return reinterpret_cast<words>(reinterpret_cast<unsigned_bytes>(a) + reinterpret_cast<unsigned_bytes>(b));
}

// 16 numbers as bytes that are raised by 64 become what they are with signs: bits of two bytes of each lane, the first or the last two
inline void set_signs(words * four, words signs, uint32_t half) {
    for (uint32_t j = 0; j < 4; ++j) {
        const words minus = where_bits(repeated(signs, half * 2 + j / 2), j % 2 == 0 ? 0x08040201 : 0x80402010);
        const words flipped = four[j] ^ (minus & all_bytes(0x7f)); // 127 less the byte
        four[j] = sum_of_bytes(flipped, minus & all_bytes(1));
    }
}

// Signs of 32 numbers by 4 times 7, a byte each: an eighth makes the number of minuses even.
inline words with_eighths(words sevens) {
    words parity = sevens ^ sevens >> 4; // in the lowest bit of each byte, in the end
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    return sevens | moved(parity, 7, 0x80);
}

// By 4 times 7 bits
inline words signs_of_sevens(words four) {
    return with_eighths((four & 0x7f) | (four << 1 & 0x7f00) | (four << 2 & 0x7f0000) | (four << 3 & 0x7f000000));
}

// Four bytes of 2 n + 1: number(i) is the n of the byte i.
template <class F> inline words odd_bytes(F number) {
    words four = {};
    for (uint32_t i = 0; i < 4; ++i) {
        four |= (number(i) * 2 + 1) << (8 * i);
    }
    return four;
}

// An F16; of each 32 numbers 4 indices of 8 bits, 4 times 7 signs and a scale of 4 bits: (2 scale + 1) / 8
struct iq2_xxs_weights {
    static constexpr size_t BYTES = 66;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 127;
    static constexpr uint32_t OFFSET_BITS = 6;
    static constexpr bool MINIMA = false;

    static void scales(in_256::block_scales & to, const weight_rows & rows) {
        to.scale = rows.halves(0) * 0.125f;
        for (uint32_t i = 0; i < 2; ++i) {
            words four[2][4];
            rows.turned(2 + i * 32, four[0]);
            rows.turned(2 + i * 32 + 16, four[1]);
            to.integers[i] = odd_bytes([&](uint32_t j) { return four[j / 2][j % 2 * 2 + 1] >> 28; });
        }
    }
    template <class F> static void numbers(const weight_rows & rows, F to) {
        const codebooks & books = all_codebooks();
        for (uint32_t i = 0; i < 8; ++i) {
            const words signs = signs_of_sevens(rows.word(2 + i * 8 + 4));
#pragma GCC unroll 2
            for (uint32_t half = 0; half < 2; ++half) {
                words four[4];
                const auto index = [&](size_t r, size_t k) { return rows.at(r)[2 + i * 8 + half * 2 + k]; };
                look_up(books.iq2_xxs, index, four);
                set_signs(four, signs, half);
                to(i * 8 + half * 4, four);
            }
        }
    }
};

// 16 scales of 4 bits in 8 bytes: (2 scale + 1) / 8
inline void unpack_sixteen(in_256::block_scales & to, const weight_rows & rows, size_t offset) {
    to.scale = rows.halves(0) * 0.125f;
    for (uint32_t i = 0; i < 2; ++i) {
        const words eight = rows.word(offset + 4 * i);
        to.integers[2 * i] = odd_bytes([&](uint32_t j) { return eight >> (4 * j) & 15; });
        to.integers[2 * i + 1] = odd_bytes([&](uint32_t j) { return eight >> (16 + 4 * j) & 15; });
    }
}

// An F16; 32 times 9 bits of an index and 7 signs; 16 scales
struct iq2_xs_weights {
    static constexpr size_t BYTES = 74;
    static constexpr uint32_t PER_SCALE = 16;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 127;
    static constexpr uint32_t OFFSET_BITS = 6;
    static constexpr bool MINIMA = false;

    static void scales(in_256::block_scales & to, const weight_rows & rows) { unpack_sixteen(to, rows, 66); }
    template <class F> static void numbers(const weight_rows & rows, F to) {
        const codebooks & books = all_codebooks();
        const indices<32> index(rows, [](const uint8_t * block, uint16_t * to) {
            for (uint32_t i = 0; i < 32; ++i) {
                to[i] = load<uint16_t>(block + 2 + i * 2) & 0x1ff;
            }
        });
        for (uint32_t i = 0; i < 8; ++i) {
            const words two = rows.word(2 + i * 8);
            const words last = rows.word(2 + i * 8 + 4);
            const words signs =
                with_eighths((two >> 9 & 0x7f) | (two >> 17 & 0x7f00) | (last << 7 & 0x7f0000) | (last >> 1 & 0x7f000000));
#pragma GCC unroll 2
            for (uint32_t half = 0; half < 2; ++half) {
                words four[4];
                look_up(books.iq2_xs, [&](size_t r, size_t k) { return index.of_row[r][i * 4 + half * 2 + k]; }, four);
                set_signs(four, signs, half);
                to(i * 8 + half * 4, four);
            }
        }
    }
};

// An F16; lower bytes of 32 indices; 256 signs; 2 upper bits of each index; 16 scales
struct iq2_s_weights {
    static constexpr size_t BYTES = 82;
    static constexpr uint32_t PER_SCALE = 16;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 127;
    static constexpr uint32_t OFFSET_BITS = 6;
    static constexpr bool MINIMA = false;

    static void scales(in_256::block_scales & to, const weight_rows & rows) { unpack_sixteen(to, rows, 74); }
    template <class F> static void numbers(const weight_rows & rows, F to) {
        const codebooks & books = all_codebooks();
        const indices<32> index(rows, [](const uint8_t * block, uint16_t * to) {
            set_indices<32>(to, block + 2, [&](uint32_t i) {
                const uint64_t four = block[66 + i];
                return (four << 8 | four << 22 | four << 36 | four << 50) & 0x0300030003000300;
            });
        });
        for (uint32_t i = 0; i < 8; ++i) {
            const words signs = rows.word(34 + i * 4);
#pragma GCC unroll 2
            for (uint32_t half = 0; half < 2; ++half) {
                words four[4];
                look_up(books.iq2_s, [&](size_t r, size_t k) { return index.of_row[r][i * 4 + half * 2 + k]; }, four);
                set_signs(four, signs, half);
                to(i * 8 + half * 4, four);
            }
        }
    }
};

// An F16; 64 indices of 8 bits; of each 32 numbers 4 times 7 signs and a scale of 4 bits: (2 scale + 1) / 4
struct iq3_xxs_weights {
    static constexpr size_t BYTES = 98;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 127;
    static constexpr uint32_t OFFSET_BITS = 6;
    static constexpr bool MINIMA = false;

    static void scales(in_256::block_scales & to, const weight_rows & rows) {
        to.scale = rows.halves(0) * 0.25f;
        for (uint32_t i = 0; i < 2; ++i) {
            words four[4];
            rows.turned(66 + i * 16, four);
            to.integers[i] = odd_bytes([&](uint32_t j) { return four[j] >> 28; });
        }
    }
    template <class F> static void numbers(const weight_rows & rows, F to) {
        const codebooks & books = all_codebooks();
        for (uint32_t i = 0; i < 8; ++i) {
            const words signs = signs_of_sevens(rows.word(66 + i * 4));
#pragma GCC unroll 2
            for (uint32_t half = 0; half < 2; ++half) {
                words four[4];
                const auto index = [&](size_t r, size_t k) { return rows.at(r)[2 + i * 8 + half * 4 + k]; };
                look_up(books.iq3_xxs, index, four);
                set_signs(four, signs, half);
                to(i * 8 + half * 4, four);
            }
        }
    }
};

// An F16; lower bytes of 64 indices, then their upper bits; 256 signs; 8 scales of 4 bits: 2 scale + 1. Bytes are raised by 16 only, so that
// sums of them fit longer.
struct iq3_s_weights {
    static constexpr size_t BYTES = 110;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 31;
    static constexpr uint32_t OFFSET_BITS = 4;
    static constexpr bool MINIMA = false;

    static void scales(in_256::block_scales & to, const weight_rows & rows) {
        to.scale = rows.halves(0);
        const words eight = rows.word(106);
        to.integers[0] = odd_bytes([&](uint32_t j) { return eight >> (4 * j) & 15; });
        to.integers[1] = odd_bytes([&](uint32_t j) { return eight >> (16 + 4 * j) & 15; });
    }
    template <class F> static void numbers(const weight_rows & rows, F to) {
        const codebooks & books = all_codebooks();
        const indices<64> index(rows, [](const uint8_t * block, uint16_t * to) {
            set_indices<64>(to, block + 2, [&](uint32_t i) {
                const uint64_t four = block[66 + i / 2] >> (i % 2 * 4) & 15;
                return (four << 8 | four << 23 | four << 38 | four << 53) & 0x0100010001000100;
            });
        });
        for (uint32_t i = 0; i < 8; ++i) {
            const words signs = rows.word(74 + i * 4);
#pragma GCC unroll 2
            for (uint32_t half = 0; half < 2; ++half) {
                words four[4];
                look_up(books.iq3_s, [&](size_t r, size_t k) { return index.of_row[r][i * 8 + half * 4 + k]; }, four);
                set_signs(four, signs, half);
                for (words & bytes : four) {
                    bytes = sum_of_bytes(bytes, all_bytes(static_cast<uint8_t>(16 - 64)));
                }
                to(i * 8 + half * 4, four);
            }
        }
    }
};

// Numbers of IQ1, which are an eighth more, or an eighth less where it is set.
inline words moved_by_eighth(words numbers, words less) { return sum_of_bytes(numbers, less | all_bytes(1)); }

// An F16; lower bytes of 32 indices; of each 32 numbers 4 times 3 bits above, a scale of 3 bits, and a bit of where they are: 2 scale + 1
struct iq1_s_weights {
    static constexpr size_t BYTES = 50;
    static constexpr uint32_t PER_SCALE = 32;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 25;
    static constexpr uint32_t OFFSET_BITS = 4;
    static constexpr bool MINIMA = false;

    static void scales(in_256::block_scales & to, const weight_rows & rows) {
        to.scale = rows.halves(0) * 0.125f;
        words two[4];
        rows.turned(34, two);
        for (uint32_t i = 0; i < 2; ++i) {
            to.integers[i] = odd_bytes([&](uint32_t j) { return two[2 * i + j / 2] >> (12 + j % 2 * 16) & 7; });
        }
    }
    template <class F> static void numbers(const weight_rows & rows, F to) {
        const codebooks & books = all_codebooks();
        const indices<32> index(rows, [](const uint8_t * block, uint16_t * to) {
            set_indices<32>(to, block + 2, [&](uint32_t i) {
                const uint64_t four = load<uint16_t>(block + 34 + i * 2) & 0x0fff;
                return (four << 8 | four << 21 | four << 34 | four << 47) & 0x0700070007000700;
            });
        });
        for (uint32_t i = 0; i < 8; ++i) {
            const words less = as_words(as_ints(rows.half_word(34 + i * 2) << 16) >> 31);
#pragma GCC unroll 2
            for (uint32_t half = 0; half < 2; ++half) {
                words four[4];
                look_up(books.iq1, [&](size_t r, size_t k) { return index.of_row[r][i * 4 + half * 2 + k]; }, four);
                for (words & bytes : four) {
                    bytes = moved_by_eighth(bytes, less);
                }
                to(i * 8 + half * 4, four);
            }
        }
    }
};

// Lower bytes of 32 indices; of each 3 bits above, and a bit of where its numbers are; four times 12 bits of 4 scales and 4 of an F16
struct iq1_m_weights {
    static constexpr size_t BYTES = 56;
    static constexpr uint32_t PER_SCALE = 16;
    static constexpr bool SIGNED = false;
    static constexpr uint32_t MOST = 25;
    static constexpr uint32_t OFFSET_BITS = 4;
    static constexpr bool MINIMA = false;

    static void scales(in_256::block_scales & to, const weight_rows & rows) {
        const words two[2] = {rows.word(48), rows.word(52)};
        const words half = (two[0] >> 12 & 0x000f) | (two[0] >> 24 & 0x00f0) | (two[1] >> 4 & 0x0f00) | (two[1] >> 16 & 0xf000);
        to.scale = low_halves(half) * 0.125f;
        for (uint32_t i = 0; i < 4; ++i) {
            to.integers[i] = odd_bytes([&](uint32_t j) { return two[i / 2] >> (i % 2 * 16 + j * 3) & 7; });
        }
    }
    template <class F> static void numbers(const weight_rows & rows, F to) {
        const codebooks & books = all_codebooks();
        const indices<32> index(rows, [](const uint8_t * block, uint16_t * to) {
            set_indices<32>(to, block, [&](uint32_t i) {
                const uint64_t four = load<uint16_t>(block + 32 + i * 2);
                return (four << 8 | four << 20 | four << 32 | four << 44) & 0x0700070007000700;
            });
        });
        for (uint32_t i = 0; i < 16; ++i) {
            const words high = rows.byte(32 + i); // 4 bits for each of two indices
            words four[4];
            look_up(books.iq1, [&](size_t r, size_t k) { return index.of_row[r][i * 2 + k]; }, four);
            for (uint32_t j = 0; j < 4; ++j) {
                const words less = as_words(as_ints(high << (28 - j / 2 * 4)) >> 31);
                four[j] = moved_by_eighth(four[j], less);
            }
            to(i * 4, four);
        }
    }
};

} // namespace

} // namespace kvg::KVG_PRODUCTS
