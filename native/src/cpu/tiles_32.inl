// Products of weights in blocks of 32. Included behind tiles.inl.
//
// A type of weights is a struct W with
//   BYTES           of a block
//   SIGNED          a number is scale * byte, and bytes have signs; or else it is scale * byte + minimum,
//   MOST            and this is the greatest byte
//   numbers(rows, to)   of a block of LANES rows: calls to(j, four) for vectors j of its bytes
//   scales(rows)    what it has beside them
//   HALVES          the first 16 numbers have one scale, the others another one. Two blocks are packed together, and numbers(rows, i, to)
//                   and scales(rows, i) are of the first or the second. Bytes have signs

namespace kvg::KVG_PRODUCTS {

namespace {

namespace in_32 {

constexpr uint32_t BLOCK = rounded_32::N;
constexpr uint32_t VECTORS = BLOCK / 4;
constexpr uint32_t CHUNK = 512; // weights of a row at a time: unpacked they stay in L1

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

template <class W> constexpr uint32_t PARTS = W::HALVES ? 2 : 1;

// Sums of integers of a block's parts
template <class W> struct part_sums {
    ints of[PARTS<W>];
};

template <class W, class FORM> inline part_sums<W> lifts(const rounded_32 & row) {
    const int32_t half = PARTS<W> == 2 ? row.lift_of_half : 0;
    part_sums<W> sums;
    sums.of[0] = FORM::RAISED ? all(half) : ints{};
    sums.of[PARTS<W> - 1] = FORM::RAISED ? all(row.lift - half) : ints{};
    return sums;
}

// A sum goes on by a block. Here alone floats are added.
template <class W>
inline floats with_block(floats sum, const part_sums<W> & in_part, const block_scales & scales, const rounded_32 & row) {
    if constexpr (!W::SIGNED) {
        sum = fused(scales.other, all(row.total), sum);
    }
#pragma GCC unroll 2
    for (uint32_t i = 0; i < PARTS<W>; ++i) {
        const floats scale = (i == 0 ? scales.scale : scales.other) * all(row.scale);
        sum = fused(__builtin_convertvector(in_part.of[i], floats), scale, sum);
    }
    return sum;
}

// N rows' sums go on by a block of each of G groups.
template <class W, class FORM, uint32_t N, uint32_t G>
inline void add_block(floats (*sum)[G], const block<FORM> * weights, const rounded_rows<rounded_32> & x, uint32_t b) {
    constexpr uint32_t TOGETHER = vectors_of_sum<W, FORM>(VECTORS / PARTS<W>);
    part_sums<W> in_part[N][G];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < N; ++r) {
#pragma GCC unroll 8
        for (uint32_t g = 0; g < G; ++g) {
            in_part[r][g] = lifts<W, FORM>(x.block(r, b));
        }
    }
#pragma GCC unroll 8
    for (uint32_t first = 0; first < VECTORS; first += TOGETHER) {
        typename FORM::sum together[N][G] = {};
        add_vectors<FORM, TOGETHER>(together, x, b * VECTORS + first, [&](uint32_t g) { return weights[g].numbers + first; });
#pragma GCC unroll 8
        for (uint32_t r = 0; r < N; ++r) {
#pragma GCC unroll 8
            for (uint32_t g = 0; g < G; ++g) {
                in_part[r][g].of[first * PARTS<W> / VECTORS] += FORM::scaled(together[r][g], once());
            }
        }
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < N; ++r) {
#pragma GCC unroll 8
        for (uint32_t g = 0; g < G; ++g) {
            sum[r][g] = with_block<W>(sum[r][g], in_part[r][g], weights[g].scales, x.block(r, b));
        }
    }
}

// With as many groups as go together, from group g on
template <class W, uint32_t N>
inline void multiply(uint32_t n_blocks, const tile<form_of_many<W>> & weights, uint32_t g, const rounded_rows<rounded_32> & x,
                     float * out) {
    using form = form_of_many<W>;
    constexpr uint32_t G = form::MOST_GROUPS;
    floats sum[N][G];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < N; ++r) {
        std::memcpy(sum[r], out + r * TILE, sizeof(sum[r]));
    }
    for (uint32_t b = 0; b < n_blocks; ++b) {
        add_block<W, form, N, G>(sum, &weights.blocks[b][g], x, b);
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

    // Of group g of block b
    template <class F> [[gnu::always_inline]] void numbers(uint32_t b, uint32_t g, F to) const {
        if constexpr (W::HALVES) {
            W::numbers(of_pair(b, g), b % 2, to);
        } else {
            W::numbers(of_block(b, g), to);
        }
    }
    block_scales scales(uint32_t b, uint32_t g) const {
        if constexpr (W::HALVES) {
            return W::scales(of_pair(b, g), b % 2);
        } else {
            return W::scales(of_block(b, g));
        }
    }
    template <class FORM> void unpack(uint32_t b, uint32_t g, block<FORM> & to) const {
        numbers(b, g, [&](uint32_t j, words four) __attribute__((always_inline)) { to.numbers[j] = FORM::store(four); });
        to.scales = scales(b, g);
    }
    // Not of small blocks: they are read slowly enough for what the CPU fetches by itself. SmolLM2 in Q4_1 decodes 10 % faster so on Zen 3,
    // Q8_0 4 % slower.
    [[gnu::always_inline]] void fetch(uint32_t b) const {
        if constexpr (W::BYTES > 32) {
            rows.fetch_behind<1>((first + b) * W::BYTES);
        }
    }

private:
    weight_rows of_block(uint32_t b, uint32_t g) const { return rows.from((first + b) * W::BYTES).group(g); }
    weight_rows of_pair(uint32_t b, uint32_t g) const { return rows.from((first + b) / 2 * 2 * W::BYTES).group(g); }
};

// One row, with weights as they are unpacked: a vector is multiplied at once, so that a group's sums stay in registers.
template <class W> void multiply_one(const piece<W> & weights, const rounded_rows<rounded_32> & x, float * out) {
    using form = form_of_one<W>;
    constexpr uint32_t TOGETHER = vectors_of_sum<W, form>(VECTORS / PARTS<W>);
    floats sum[GROUPS];
    std::memcpy(sum, out, sizeof(sum));
    for (uint32_t b = 0; b < weights.n_blocks; ++b) {
        weights.fetch(b);
        const rounded_32 & row = x.block(0, b);
#pragma GCC unroll 4
        for (uint32_t g = 0; g < GROUPS; ++g) {
            const block_scales scales = weights.scales(b, g);
            part_sums<W> in_part = lifts<W, form>(row);
            typename form::sum together = {};
            uint32_t n = 0;
            weights.numbers(b, g, [&](uint32_t j, words four) __attribute__((always_inline)) {
                form::add_products(together, form::store(four), x.four(0, b * VECTORS + j));
                if (++n % TOGETHER == 0) {
                    in_part.of[j * PARTS<W> / VECTORS] += form::scaled(together, once());
                    together = typename form::sum{};
                }
            });
            sum[g] = with_block<W>(sum[g], in_part, scales, row);
        }
    }
    std::memcpy(out, sum, sizeof(sum));
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
            multiply<W, n>(weights.n_blocks, scratch, g, x.from(r), out[r] + g * LANES);
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
