// Products of weights in blocks of 32. Included behind tiles.inl.
//
// A type of weights is a struct W with
//   BYTES           of a block
//   SIGNED          a number is scale * byte, and bytes have signs; or else it is scale * byte + minimum,
//   MOST            and this is the greatest byte
//   numbers(rows)   of a block of LANES rows: bytes
//   scales(rows)    what it has beside them
//   HALVES          the first 16 numbers have one scale, the others another one. Two blocks are packed together, and numbers(rows, i) and
//                   scales(rows, i) are of the first or the second. Bytes have signs

namespace kvg::KVG_PRODUCTS {

namespace {

namespace in_32 {

constexpr uint32_t BLOCK = rounded_32::N;
constexpr uint32_t VECTORS = BLOCK / 4;
constexpr uint32_t CHUNK = 512; // weights of a row at a time: unpacked they stay in L1

struct block_numbers {
    words at[VECTORS]; // vector j has numbers 4j to 4j + 3
};

struct block_scales {
    floats scale;
    floats other; // a minimum, or the scale of the other half
};

template <class FORM> struct block {
    typename FORM::stored numbers[VECTORS];
    block_scales scales;
};

template <class FORM> struct tile {
    block<FORM> blocks[CHUNK / BLOCK][GROUPS];
};

// which: nothing, or which half of a pair
template <class W, class FORM, class... I> inline void unpack(block<FORM> & to, const weight_rows & rows, I... which) {
    const block_numbers numbers = W::numbers(rows, which...);
    for (uint32_t j = 0; j < VECTORS; ++j) {
        to.numbers[j] = FORM::store(numbers.at[j]);
    }
    to.scales = W::scales(rows, which...);
}

// N rows' sums go on by a block of each of G groups. Here alone floats are added.
template <class W, class FORM, uint32_t N, uint32_t G>
inline void add_block(floats (*sum)[G], const block<FORM> * weights, const rounded_rows<rounded_32> & x, uint32_t b) {
    constexpr uint32_t PARTS = W::HALVES ? 2 : 1;
    constexpr uint32_t TOGETHER = vectors_of_sum<W, FORM>(VECTORS / PARTS);
    ints in_part[N][G][PARTS];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < N; ++r) {
        const rounded_32 & row = x.block(r, b);
        const int32_t half = PARTS == 2 ? row.lift_of_half : 0;
#pragma GCC unroll 8
        for (uint32_t g = 0; g < G; ++g) {
            in_part[r][g][0] = FORM::RAISED ? all(half) : ints{};
            in_part[r][g][PARTS - 1] = FORM::RAISED ? all(row.lift - half) : ints{};
        }
    }
#pragma GCC unroll 8
    for (uint32_t first = 0; first < VECTORS; first += TOGETHER) {
        typename FORM::sum together[N][G] = {};
#pragma GCC unroll 8
        for (uint32_t j = first; j < first + TOGETHER; ++j) {
#pragma GCC unroll 8
            for (uint32_t r = 0; r < N; ++r) {
                const words four = x.four(r, b * VECTORS + j);
#pragma GCC unroll 8
                for (uint32_t g = 0; g < G; ++g) {
                    FORM::add_products(together[r][g], weights[g].numbers[j], four);
                }
            }
        }
#pragma GCC unroll 8
        for (uint32_t r = 0; r < N; ++r) {
#pragma GCC unroll 8
            for (uint32_t g = 0; g < G; ++g) {
                in_part[r][g][first * PARTS / VECTORS] += FORM::scaled(together[r][g], once());
            }
        }
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < N; ++r) {
        const rounded_32 & row = x.block(r, b);
#pragma GCC unroll 8
        for (uint32_t g = 0; g < G; ++g) {
            const block_scales & scales = weights[g].scales;
            if constexpr (!W::SIGNED) {
                sum[r][g] = fused(scales.other, all(row.total), sum[r][g]);
            }
#pragma GCC unroll 2
            for (uint32_t i = 0; i < PARTS; ++i) {
                const floats scale = (i == 0 ? scales.scale : scales.other) * all(row.scale);
                sum[r][g] = fused(__builtin_convertvector(in_part[r][g][i], floats), scale, sum[r][g]);
            }
        }
    }
}

// blocks_of(b): block b of each of G groups
template <class W, class FORM, uint32_t N, uint32_t G, class F>
inline void multiply(uint32_t n_blocks, F blocks_of, const rounded_rows<rounded_32> & x, float * out) {
    floats sum[N][G];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < N; ++r) {
        std::memcpy(sum[r], out + r * TILE, sizeof(sum[r]));
    }
    for (uint32_t b = 0; b < n_blocks; ++b) {
        add_block<W, FORM, N, G>(sum, blocks_of(b), x, b);
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < N; ++r) {
        std::memcpy(out + r * TILE, sum[r], sizeof(sum[r]));
    }
}

// Blocks of a tile that follow each other
template <class W> struct piece {
    tile_rows rows;
    uint32_t first;
    uint32_t n_blocks;

    // Group g of block b
    template <class FORM> void unpack(uint32_t b, uint32_t g, block<FORM> & to) const {
        if constexpr (W::HALVES) {
            in_32::unpack<W>(to, rows.from((first + b) / 2 * 2 * W::BYTES).group(g), b % 2);
        } else {
            in_32::unpack<W>(to, rows.from((first + b) * W::BYTES).group(g));
        }
    }
    [[gnu::always_inline]] void fetch(uint32_t b) const {
        constexpr uint32_t blocks_of_line = W::BYTES > 32 ? 1 : 64 / W::BYTES;
        if (b % blocks_of_line == 0) {
            rows.fetch_behind<1>((first + b) * W::BYTES);
        }
    }
};

// One row, with weights as they are unpacked.
template <class W> void multiply_one(const piece<W> & weights, const rounded_rows<rounded_32> & x, float * out) {
    using form = form_of_one<W>;
    block<form> now[GROUPS];
    const auto blocks_of = [&](uint32_t b) {
        weights.fetch(b);
#pragma GCC unroll 8
        for (uint32_t g = 0; g < GROUPS; ++g) {
            weights.unpack(b, g, now[g]);
        }
        return now;
    };
    multiply<W, form, 1, GROUPS>(weights.n_blocks, blocks_of, x, out);
}

template <class W>
void multiply_many(tile<form_of_many<W>> & scratch, const piece<W> & weights, const rounded_rows<rounded_32> & x,
                   uint32_t n_rows, sums * out) {
    using form = form_of_many<W>;
    for (uint32_t b = 0; b < weights.n_blocks; ++b) {
        weights.fetch(b);
#pragma GCC unroll 8
        for (uint32_t g = 0; g < GROUPS; ++g) {
            weights.unpack(b, g, scratch.blocks[b][g]);
        }
    }
    by<form::MOST_ROWS>(n_rows, [&](auto n, uint32_t r) {
        for (uint32_t g = 0; g < GROUPS; g += form::MOST_GROUPS) {
            const auto blocks_of = [&](uint32_t b) { return &scratch.blocks[b][g]; };
            multiply<W, form, n, form::MOST_GROUPS>(weights.n_blocks, blocks_of, x.from(r), out[r] + g * LANES);
        }
    });
}

template <class W> void run(const product_job & job, uint32_t begin, uint32_t end) {
    tile<form_of_many<W>> scratch;
    const size_t stride = row_bytes<rounded_32>(job.n_in);
    run_tiles<tile_rows>(
        job, begin, end, stride, [&](const tile_rows & weights, const uint8_t * rows, uint32_t n_rows, sums * out) {
            for (uint32_t in = 0; in < job.n_in; in += CHUNK) {
                const uint32_t b = in / BLOCK;
                const uint32_t n_blocks = (job.n_in - in < CHUNK ? job.n_in - in : CHUNK) / BLOCK;
                const piece<W> here = {weights, b, n_blocks};
                const rounded_rows<rounded_32> x = {rows + in, rows + job.n_in + b * sizeof(rounded_32), stride};
                if (n_rows == 1) {
                    multiply_one<W>(here, x, out[0]);
                } else {
                    multiply_many<W>(scratch, here, x, n_rows, out);
                }
            }
        });
}

} // namespace in_32

} // namespace

} // namespace kvg::KVG_PRODUCTS
