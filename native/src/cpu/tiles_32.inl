// Products of weights in blocks of 32. Included behind tiles.inl.
//
// A type of weights is a struct W with
//   BYTES           of a block
//   SIGNED          a number is scale * byte, and bytes have signs; or else it is scale * byte + minimum,
//   MOST            and this is the greatest byte
//   numbers(rows)   of a block of LANES rows: bytes
//   scales(rows)    what it has beside them

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
    floats minimum;
};

template <class FORM> struct block {
    typename FORM::stored numbers[VECTORS];
    block_scales scales;
};

template <class FORM> struct tile {
    block<FORM> blocks[CHUNK / BLOCK][GROUPS];
};

template <class W, class FORM> inline void unpack(block<FORM> & to, const weight_rows & rows) {
    const block_numbers numbers = W::numbers(rows);
    for (uint32_t j = 0; j < VECTORS; ++j) {
        to.numbers[j] = FORM::store(numbers.at[j]);
    }
    to.scales = W::scales(rows);
}

// N rows' sums go on by a block of each of G groups. Here alone floats are added.
template <class W, class FORM, uint32_t N, uint32_t G>
inline void add_block(floats (*sum)[G], const block<FORM> * weights, const rounded_rows<rounded_32> & x, uint32_t b) {
    constexpr uint32_t TOGETHER = vectors_of_sum<W, FORM>(VECTORS);
    ints in_block[N][G];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < N; ++r) {
#pragma GCC unroll 8
        for (uint32_t g = 0; g < G; ++g) {
            in_block[r][g] = FORM::RAISED ? all(x.block(r, b).lift) : ints{};
        }
    }
#pragma GCC unroll 8
    for (uint32_t first = 0; first < VECTORS; first += TOGETHER) {
        typename FORM::sum part[N][G] = {};
#pragma GCC unroll 8
        for (uint32_t j = first; j < first + TOGETHER; ++j) {
#pragma GCC unroll 8
            for (uint32_t r = 0; r < N; ++r) {
                const words four = x.four(r, b * VECTORS + j);
#pragma GCC unroll 8
                for (uint32_t g = 0; g < G; ++g) {
                    FORM::add_products(part[r][g], weights[g].numbers[j], four);
                }
            }
        }
#pragma GCC unroll 8
        for (uint32_t r = 0; r < N; ++r) {
#pragma GCC unroll 8
            for (uint32_t g = 0; g < G; ++g) {
                in_block[r][g] += FORM::scaled(part[r][g], once());
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
                sum[r][g] = fused(scales.minimum, all(row.total), sum[r][g]);
            }
            sum[r][g] = fused(__builtin_convertvector(in_block[r][g], floats), scales.scale * all(row.scale), sum[r][g]);
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
    uint32_t n_blocks;

    weight_rows at(uint32_t b, uint32_t g) const { return rows.from(b * W::BYTES).group(g); }
    void fetch(uint32_t b) const {
        constexpr uint32_t blocks_of_line = W::BYTES > 32 ? 1 : 64 / W::BYTES;
        if (b % blocks_of_line == 0) {
            rows.fetch(b * W::BYTES);
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
            unpack<W>(now[g], weights.at(b, g));
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
            unpack<W>(scratch.blocks[b][g], weights.at(b, g));
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
    run_tiles(job, begin, end, stride, [&](const tile_rows & weights, const uint8_t * rows, uint32_t n_rows, sums * out) {
        for (uint32_t in = 0; in < job.n_in; in += CHUNK) {
            const uint32_t b = in / BLOCK;
            const uint32_t n_blocks = (job.n_in - in < CHUNK ? job.n_in - in : CHUNK) / BLOCK;
            const piece<W> here = {weights.from(b * W::BYTES), n_blocks};
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
