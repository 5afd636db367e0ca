// Products of weights in blocks of 256, by AVX-512 VNNI: all of them share a scale, and 16 or 32 have an integer of their own beside it.
//
// A type of weights is a struct W with
//   BYTES               of a block
//   PER_SCALE           numbers with an integer scale of their own: 16, 32, or 256 where there is none
//   MINIMA              whether what is added to a scaled number has a scale of its own
// and, if it is unpacked by lanes, of which each is a row of weights,
//   scales(to, rows)    fills a tile's scales and pairs from a block of 16 rows
//   numbers(rows, to)   calls to(j, v) for each vector j of its numbers
// or else, if it is unpacked row by row, without MINIMA,
//   RAISED                    numbers are bytes, raised by 2 to this power, and below 128
//   of_row                    what prepare(block, of_row) makes of a row's block
//   scales(block, of_row)     integers of 16 bits, 16 or 8 of them
//   group(block, of_row, i)   numbers 64 i to 64 i + 63 of a row's block
//   scale(rows)               of a block of 16 rows
//   IN_ORDER                  whether few rows are multiplied with one row of weights after the other, or with one block of 16 after the other,
//                             which is faster where unpacking takes longer than memory
#include "cpu/rounded_rows.h"
#include "cpu/vnni.inl"

namespace kvg::products_vnni {

namespace {

constexpr uint32_t BLOCK = rounded_256::N;
constexpr uint32_t GROUPS = BLOCK / 64;
constexpr size_t AHEAD = 8192; // bytes that are fetched before they are needed, where blocks are read in the order of memory
template <class W> constexpr uint32_t RUN = W::IN_ORDER ? 64 : 1; // blocks of a row of weights, at most, before the next row's

// What a block's sums are multiplied by in the end: a lane is a row of weights.
struct block_scales {
    __m512i pairs[8];  // two I16 in each lane: factors of two sums of 16 or 32 of a row's numbers
    __m512 scale;      // of the block's sum of products; without MINIMA, of the pairs' products, too
    __m512 pair_scale; // of the pairs' products, with MINIMA
};

// A block of 16 rows of weights: a lane is a row.
struct tile : block_scales {
    __m512i numbers[BLOCK / 4]; // unsigned bytes: vector j has numbers 4j to 4j + 3
    __m512i scales[16];         // integers, of 16 or 32 numbers each
};

// Rounded rows, at some block.
struct rounded_rows {
    const uint8_t * numbers;
    const uint8_t * blocks;
    size_t stride;

    rounded_rows from(uint32_t row) const { return {numbers + row * stride, blocks + row * stride, stride}; }
    rounded_rows from_block(uint32_t b) const { return {numbers + b * BLOCK, blocks + b * sizeof(rounded_256), stride}; }
    const uint8_t * block(uint32_t row) const { return blocks + row * stride; }
    __m512i four(uint32_t row, uint32_t j) const { return _mm512_set1_epi32(load<int32_t>(numbers + row * stride + j * 4)); }
};

// Two integers that fit into 16 bits
inline __m512i paired(__m512i low, __m512i high) { return _mm512_mask_mov_epi16(low, 0xaaaaaaaa, _mm512_slli_epi32(high, 16)); }

// What is added to scaled numbers whose bytes are raised by 2 to the power of `bits`.
template <uint32_t PER_SCALE> inline void lower(tile & of, uint32_t bits) {
    for (uint32_t i = 0; i < BLOCK / PER_SCALE / 2; ++i) {
        const __m512i two = _mm512_slli_epi16(paired(of.scales[2 * i], of.scales[2 * i + 1]), bits);
        of.pairs[i] = _mm512_sub_epi16(_mm512_setzero_si512(), two);
    }
}

// Adds the products of a row's sums of numbers with `pairs` to `sum`.
template <uint32_t PER_SCALE> inline __m512i add_pairs(const block_scales & with, const uint8_t * block, __m512i sum) {
    constexpr uint32_t n = PER_SCALE == 16 ? 8 : 4;
    constexpr size_t sums = PER_SCALE == 16 ? offsetof(rounded_256, sums16) : offsetof(rounded_256, sums32);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < n; ++i) {
        sum = _mm512_dpwssd_epi32(sum, with.pairs[i], _mm512_set1_epi32(load<int32_t>(block + sums + 4 * i)));
    }
    return sum;
}
template <uint32_t PER_SCALE> inline __m512i add_pairs(const block_scales & with, const uint8_t * block) {
    return add_pairs<PER_SCALE>(with, block, _mm512_setzero_si512());
}

// A row's sum goes on by its products with a block, and by what add_pairs() gives with minima. All kernels add floats here, so that they give
// the same bits.
template <bool MINIMA>
[[gnu::always_inline]] inline void add_products(const block_scales & weights, __m512 products, __m512 minima,
                                                const uint8_t * block, float * out) {
    const __m512 scale = _mm512_set1_ps(load<float>(block));
    __m512 sum = _mm512_fmadd_ps(products, _mm512_mul_ps(weights.scale, scale), _mm512_load_ps(out));
    if constexpr (MINIMA) {
        sum = _mm512_fmadd_ps(minima, _mm512_mul_ps(weights.pair_scale, scale), sum);
    }
    _mm512_store_ps(out, sum);
}

// The same; `in_block`: the products as integers
template <uint32_t PER_SCALE, bool MINIMA>
inline void add_block(const block_scales & weights, __m512i in_block, const uint8_t * block, float * out) {
    const __m512 minima = MINIMA ? _mm512_cvtepi32_ps(add_pairs<PER_SCALE>(weights, block)) : _mm512_setzero_ps();
    add_products<MINIMA>(weights, _mm512_cvtepi32_ps(in_block), minima, block, out);
}

template <uint32_t PER_SCALE, bool MINIMA, uint32_t N> void multiply(const tile & weights, const rounded_rows & x, sums * out) {
    constexpr uint32_t VECTORS = PER_SCALE / 4;
    __m512i sum[N];
    for (uint32_t r = 0; r < N; ++r) {
        sum[r] = MINIMA ? _mm512_setzero_si512() : add_pairs<PER_SCALE>(weights, x.block(r));
    }
    for (uint32_t s = 0; s < BLOCK / PER_SCALE; ++s) {
        __m512i products[N];
        for (uint32_t r = 0; r < N; ++r) {
            products[r] = PER_SCALE == BLOCK ? sum[r] : _mm512_setzero_si512();
        }
        for (uint32_t j = s * VECTORS; j < (s + 1) * VECTORS; ++j) {
            for (uint32_t r = 0; r < N; ++r) {
                products[r] = _mm512_dpbusd_epi32(products[r], weights.numbers[j], x.four(r, j));
            }
        }
        for (uint32_t r = 0; r < N; ++r) {
            const auto scaled = [&] { return _mm512_mullo_epi32(products[r], weights.scales[s]); };
            sum[r] = PER_SCALE == BLOCK ? products[r] : _mm512_add_epi32(sum[r], scaled());
        }
    }
    for (uint32_t r = 0; r < N; ++r) {
        add_block<PER_SCALE, MINIMA>(weights, sum[r], x.block(r), out[r]);
    }
}

// N rows with weights as they are unpacked: each scale's products have accumulators of their own.
template <class W, uint32_t N>
void multiply_by_lanes(tile & scales, const weight_rows & weights, const rounded_rows & x, sums * out) {
    constexpr bool SCALED = W::PER_SCALE != BLOCK;
    constexpr uint32_t PARTS = SCALED ? BLOCK / W::PER_SCALE : N == 1 ? 8 : 2; // not one, which each product would wait for
    W::scales(scales, weights);
    __m512i sum[N];
    __m512i products[PARTS][N];
    for (uint32_t r = 0; r < N; ++r) {
        sum[r] = W::MINIMA ? _mm512_setzero_si512() : add_pairs<W::PER_SCALE>(scales, x.block(r));
        for (uint32_t s = 0; s < PARTS; ++s) {
            products[s][r] = _mm512_setzero_si512();
        }
    }
    const auto add = [&](uint32_t r, uint32_t s) __attribute__((always_inline)) {
        const auto scaled = [&] { return _mm512_mullo_epi32(products[s][r], scales.scales[s]); };
        sum[r] = _mm512_add_epi32(sum[r], SCALED ? scaled() : products[s][r]);
    };
    constexpr bool SOON = N > 1; // else there are too few registers
    uint32_t n_done[PARTS] = {}; // as loops are unrolled, the compiler knows these
    W::numbers(weights, [&](uint32_t j, __m512i v) __attribute__((always_inline)) {
        const uint32_t s = SCALED ? j / (W::PER_SCALE / 4) : j % PARTS;
        ++n_done[s];
        for (uint32_t r = 0; r < N; ++r) {
            products[s][r] = _mm512_dpbusd_epi32(products[s][r], v, x.four(r, j));
            if (SOON && n_done[s] == BLOCK / 4 / PARTS) {
                add(r, s);
            }
        }
    });
    for (uint32_t s = 0; !SOON && s < PARTS; ++s) {
        add(0, s);
    }
    for (uint32_t r = 0; r < N; ++r) {
        add_block<W::PER_SCALE, W::MINIMA>(scales, sum[r], x.block(r), out[r]);
    }
}

// Of 16 vectors the sum of all lanes: that of vector i is in lane i.
inline __m512i sums_of_lanes(const __m512i * v) {
    return sums_of_halves(sums_of_halves(sums_of_fours(v), sums_of_fours(v + 4)),
                          sums_of_halves(sums_of_fours(v + 8), sums_of_fours(v + 12)));
}

// 16 blocks, each of a row of weights
template <class W> class blocks_of_rows {
public:
    // Block b of row i of so many blocks is block i * n + b: these are 16 from `first` on.
    blocks_of_rows(const weight_rows & rows, uint32_t first, uint32_t n) {
        uint32_t row = first / n;
        uint32_t b = first % n;
        for (uint32_t i = 0; i < TILE; ++i) {
            at_[i] = rows.at(row) + b * W::BYTES;
            in_row_[i] = b;
            W::prepare(at_[i], of_row_[i]);
            const bool is_last = ++b == n;
            row += is_last;
            b = is_last ? 0 : b;
        }
    }
    // A block of each row
    explicit blocks_of_rows(const weight_rows & rows) : blocks_of_rows(rows, 0, 1) {}
    uint32_t in_row(uint32_t i) const { return in_row_[i]; }
    __m512i group(uint32_t i, uint32_t group) const { return W::group(at_[i], of_row_[i], group); }
    // 16 integers of 16 bits, or as many as there are
    __m256i scales(uint32_t i) const { return W::scales(at_[i], of_row_[i]); }
    [[gnu::always_inline]] void fetch(uint32_t i) const {
#pragma GCC unroll 4
        for (size_t line = 0; line < W::BYTES; line += 64) {
            _mm_prefetch(at_[i] + AHEAD + line, _MM_HINT_T1);
        }
    }

private:
    const uint8_t * at_[TILE];
    uint32_t in_row_[TILE];
    typename W::of_row of_row_[TILE];
};

// Of each scale 16 bits, for 64 numbers in pairs. all: the first ones
template <uint32_t PER_SCALE> inline __m512i scales_of_group(__m512i all, uint32_t group) {
    constexpr uint32_t n = 64 / PER_SCALE;
    const auto scale = [&](uint32_t i) { return _mm_set1_epi16(static_cast<int16_t>(group * n + i * n / 4)); };
    const auto two = [&](uint32_t i) { return _mm256_inserti128_si256(_mm256_castsi128_si256(scale(i)), scale(i + 1), 1); };
    return _mm512_permutexvar_epi16(joined(two(0), two(2)), all);
}

// What N rows of numbers give with one block of weights after the other. Sums of products are in many lanes until the end.
template <class W, uint32_t N> struct block_products {
    __m512i of[N][TILE];

    // A function of its own, which has all registers.
    [[gnu::noinline]] void multiply(const blocks_of_rows<W> & blocks, const rounded_rows & rows) {
        __m512i held[N][GROUPS]; // what all blocks are multiplied by
        for (uint32_t r = 0; r < N && !W::IN_ORDER; ++r) {
            for (uint32_t group = 0; group < GROUPS; ++group) {
                held[r][group] = _mm512_loadu_si512(rows.from(r).numbers + group * 64);
                if constexpr (N == 1) {
                    asm("" : "+v"(held[r][group])); // else it is read from memory again for each row of weights
                }
            }
        }
        for (uint32_t i = 0; i < TILE; ++i) {
            const rounded_rows x = W::IN_ORDER ? rows.from_block(blocks.in_row(i)) : rows;
            if constexpr (W::IN_ORDER) {
                blocks.fetch(i);
            }
            __m512i sum[N];
            const __m512i scales = begin(sum, blocks.scales(i), x);
#pragma GCC unroll 4
            for (uint32_t group = 0; group < GROUPS; ++group) {
                const __m512i numbers = blocks.group(i, group);
                const __m512i scale = scales_of_group<W::PER_SCALE>(scales, group);
                for (uint32_t r = 0; r < N; ++r) {
                    const __m512i row = W::IN_ORDER ? _mm512_loadu_si512(x.from(r).numbers + group * 64) : held[r][group];
                    sum[r] = _mm512_dpwssd_epi32(sum[r], _mm512_maddubs_epi16(numbers, row), scale);
                }
            }
            for (uint32_t r = 0; r < N; ++r) {
                of[r][i] = sum[r];
            }
        }
    }

private:
    // Sums begin with what lowers numbers again.
    static __m512i begin(__m512i * sum, __m256i sixteen, const rounded_rows & rows) {
        const __m512i zero = _mm512_setzero_si512();
        if constexpr (W::PER_SCALE == 16) {
            for (uint32_t r = 0; r < N; ++r) {
                const __m256i products = _mm256_madd_epi16(sixteen, load_256(rows.block(r) + offsetof(rounded_256, sums16)));
                sum[r] = _mm512_sub_epi32(zero, _mm512_zextsi256_si512(_mm256_slli_epi32(products, W::RAISED)));
            }
        } else {
            const __m128i eight = _mm256_castsi256_si128(sixteen);
            for (uint32_t r = 0; r < N; ++r) {
                const __m128i products = _mm_madd_epi16(eight, load_128(rows.block(r) + offsetof(rounded_256, sums32)));
                sum[r] = _mm512_sub_epi32(zero, _mm512_zextsi128_si512(_mm_slli_epi32(products, W::RAISED)));
            }
        }
        return _mm512_castsi256_si512(sixteen);
    }
};

// N rows with a block of 16 rows of weights
template <class W, uint32_t N>
void multiply_by_rows(tile & scratch, const weight_rows & weights, const rounded_rows & x, sums * out) {
    block_products<W, N> products;
    products.multiply(blocks_of_rows<W>(weights), x);
    scratch.scale = W::scale(weights);
    for (uint32_t r = 0; r < N; ++r) {
        add_block<W::PER_SCALE, false>(scratch, sums_of_lanes(products.of[r]), x.block(r), out[r]);
    }
}

// With n blocks, which are read in the order of memory. When all are multiplied, a lane is a row again.
template <class W, uint32_t N>
void multiply_in_order(tile & scratch, const weight_rows & weights, const rounded_rows & x, uint32_t n, sums * out) {
    alignas(64) int32_t integers[N][TILE * RUN<W> + TILE]; // more than are used: 16 are read at once
    for (uint32_t first = 0; first < TILE * n; first += TILE) {
        block_products<W, N> products;
        products.multiply(blocks_of_rows<W>(weights, first, n), x);
        for (uint32_t r = 0; r < N; ++r) {
            _mm512_store_si512(integers[r] + first, sums_of_lanes(products.of[r]));
        }
    }
    for (uint32_t first = 0; first < n; first += TILE) {
        __m512i turned[N][TILE];
        for (uint32_t r = 0; r < N; ++r) {
            for (uint32_t i = 0; i < TILE; ++i) {
                turned[r][i] = _mm512_loadu_si512(integers[r] + i * n + first);
            }
            transpose(turned[r]);
        }
        for (uint32_t b = first; b < n && b < first + TILE; ++b) {
            scratch.scale = W::scale(weights.from(b * W::BYTES));
            for (uint32_t r = 0; r < N; ++r) {
                add_block<W::PER_SCALE, false>(scratch, turned[r][b - first], x.from_block(b).block(r), out[r]);
            }
        }
    }
}

template <class W> void unpack_lanes(tile & to, const weight_rows & rows) {
    W::scales(to, rows);
    W::numbers(rows, [&](uint32_t j, __m512i v) __attribute__((always_inline)) { to.numbers[j] = v; });
}

// A type that is unpacked row by row: rows are then turned, so that a lane is a row.
template <class W> void unpack_rows(tile & to, const weight_rows & rows) {
    const blocks_of_rows<W> blocks(rows);
    to.scale = W::scale(rows);
    alignas(64) uint8_t of_rows[TILE][32];
    for (uint32_t i = 0; i < TILE; ++i) {
        _mm256_store_si256(reinterpret_cast<__m256i *>(of_rows[i]), blocks.scales(i));
    }
    const weight_rows scales(of_rows[0], sizeof(of_rows[0]), sizeof(of_rows[0]), 0);
    for (uint32_t i = 0; i < BLOCK / W::PER_SCALE / 8; ++i) {
        __m512i words[4];
        scales.words(i * 16, words);
        for (uint32_t j = 0; j < 4; ++j) {
            const uint32_t pair = i * 4 + j;
            to.scales[2 * pair] = _mm512_srai_epi32(_mm512_slli_epi32(words[j], 16), 16);
            to.scales[2 * pair + 1] = _mm512_srai_epi32(words[j], 16);
            to.pairs[pair] = _mm512_sub_epi16(_mm512_setzero_si512(), _mm512_slli_epi16(words[j], W::RAISED));
        }
    }
    for (uint32_t group = 0; group < GROUPS; ++group) {
        __m512i * numbers = to.numbers + group * TILE;
        for (uint32_t i = 0; i < TILE; ++i) {
            numbers[i] = blocks.group(i, group);
        }
        transpose(numbers);
    }
}

template <class W, class = void> constexpr bool BY_ROWS = false;
template <class W> constexpr bool BY_ROWS<W, std::void_t<typename W::of_row>> = true;

// A function of its own: in line it makes products with some types 2 % slower.
template <class W> [[gnu::noinline]] void unpack(tile & to, const weight_rows & rows) {
    if constexpr (BY_ROWS<W>) {
        unpack_rows<W>(to, rows);
    } else {
        unpack_lanes<W>(to, rows);
    }
}

// FEW: as many rows or fewer are multiplied without a tile. BY_STREAMS: as in tiles
template <class W, uint32_t FEW, bool BY_STREAMS, class F>
inline void run_blocks(const product_job & job, uint32_t begin, uint32_t end, F multiply_few) {
    tile scratch;
    const size_t stride = row_bytes<rounded_256>(job.n_in);
    const uint32_t n_blocks = job.n_in / BLOCK;
    const auto multiply_all = [&](const weight_rows & weights, const uint8_t * rows, uint32_t n, sums * out) {
        const rounded_rows x = {rows, rows + job.n_in, stride};
        if (few<FEW>(n, [&](auto count) { multiply_few(count, scratch, weights, x, n_blocks, out); })) {
            return;
        }
        for (uint32_t b = 0; b < n_blocks; ++b) {
            const weight_rows block = weights.from(b * W::BYTES);
            weights.fetch_behind<W::BYTES>(b * W::BYTES);
            unpack<W>(scratch, block);
            by_eights(n, [&](auto count, uint32_t r) {
                multiply<W::PER_SCALE, W::MINIMA, count>(scratch, x.from_block(b).from(r), out + r);
            });
        }
    };
    run_tiles<weight_rows>(job, begin, end, stride, multiply_all, BY_STREAMS);
}

template <class W> void run_by_lanes(const product_job & job, uint32_t begin, uint32_t end) {
    const auto few = [](auto n, tile & scratch, const weight_rows & weights, const rounded_rows & x, uint32_t n_blocks,
                        sums * out) {
        for (uint32_t b = 0; b < n_blocks; ++b) {
            const weight_rows block = weights.from(b * W::BYTES);
            weights.fetch_behind<W::BYTES>(b * W::BYTES);
            multiply_by_lanes<W, n>(scratch, block, x.from_block(b), out);
        }
    };
    constexpr uint32_t FEW = W::PER_SCALE == 16 ? 3 : 5; // there are not enough registers for more sums
    run_blocks<W, FEW, true>(job, begin, end, few);
}

// A token and up to four drafts go row by row, more rows by lanes.
template <class W> void run_by_rows(const product_job & job, uint32_t begin, uint32_t end) {
    const auto few = [](auto n, tile & scratch, const weight_rows & weights, const rounded_rows & x, uint32_t n_blocks,
                        sums * out) {
        for (uint32_t b = 0; b < n_blocks; b += RUN<W>) {
            const weight_rows from = weights.from(b * W::BYTES);
            if constexpr (W::IN_ORDER) {
                multiply_in_order<W, n>(scratch, from, x.from_block(b), n_blocks - b < RUN<W> ? n_blocks - b : RUN<W>, out);
            } else {
                weights.fetch_behind<W::BYTES>(b * W::BYTES);
                multiply_by_rows<W, n>(scratch, from, x.from_block(b), out);
            }
        }
    };
    run_blocks<W, 5, !W::IN_ORDER>(job, begin, end, few);
}

template <class W> void run(const product_job & job, uint32_t begin, uint32_t end) {
    if constexpr (BY_ROWS<W>) {
        run_by_rows<W>(job, begin, end);
    } else {
        run_by_lanes<W>(job, begin, end);
    }
}

} // namespace

} // namespace kvg::products_vnni
