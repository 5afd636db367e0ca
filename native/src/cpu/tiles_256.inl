// Products of weights in blocks of 256: all of them share a scale, and 16 or 32 have an integer of their own beside it. Included behind
// tiles.inl.
//
// A type of weights is a struct W with
//   BYTES               of a block
//   PER_SCALE           numbers with an integer scale of their own: 16, 32, or 256 where there is none
//   SIGNED              bytes have signs, and are the numbers; or else they are up to
//   MOST                and 2 to the power of
//   OFFSET_BITS         less is the number,
//   MINIMA              or what is added to a scaled number has a scale of its own
//   scales(to, rows)    a block's scales of LANES rows
//   numbers(rows, to)   calls to(j, four) for vectors j to j + 3 of its bytes, and so on for all of them

namespace kvg::KVG_PRODUCTS {

namespace {

namespace in_256 {

constexpr uint32_t BLOCK = rounded_256::N;

// What a block has beside its numbers. Four bytes in each lane, one behind the other; all have signs.
struct block_scales {
    words integers[4]; // scales of 16 or 32 numbers each
    words minima[4];   // with MINIMA
    floats scale;      // of them all
    floats pair_scale; // instead, with MINIMA
};

// The same, ready to be multiplied
struct block_factors {
    factors by[16];
    pairs added[8]; // or subtracted without MINIMA: what is multiplied by sums of 16 or 32 of a row's numbers
    floats scale;
    floats pair_scale;
};

// A block of LANES rows of weights
template <class FORM> struct group {
    typename FORM::stored numbers[BLOCK / 4]; // vector j has numbers 4j to 4j + 3
    block_factors factors;
};

template <class FORM> struct tile {
    group<FORM> groups[GROUPS];
};

template <class W> constexpr bool SCALED = W::PER_SCALE != BLOCK;
template <class W, class FORM> constexpr bool HAS_PAIRS = !W::SIGNED || FORM::RAISED;
// Sums of 32 of a row's numbers serve where there are no scales.
template <class W> constexpr uint32_t PAIRS = W::PER_SCALE == 16 ? 8 : 4;

// What all bytes are greater by, as a power of two
template <class W> constexpr uint32_t offset_bits() {
    if constexpr (W::SIGNED) {
        return 7;
    } else if constexpr (W::MINIMA) {
        return 0;
    } else {
        return W::OFFSET_BITS;
    }
}

template <class W, class FORM> inline void unpack_factors(block_factors & to, const weight_rows & rows) {
    block_scales scales;
    W::scales(scales, rows);
    to.scale = scales.scale;
    if constexpr (SCALED<W>) {
        for (uint32_t i = 0; i < BLOCK / W::PER_SCALE; ++i) {
            to.by[i] = factors_of(scales.integers[i / 4], i % 4);
        }
    }
    if constexpr (W::MINIMA) {
        to.pair_scale = scales.pair_scale;
    }
    if constexpr (HAS_PAIRS<W, FORM>) {
        const words * of = W::MINIMA ? scales.minima : scales.integers;
        for (uint32_t i = 0; i < PAIRS<W>; ++i) {
            to.added[i] = pairs_of(SCALED<W> ? of[i / 2] : all_bytes(1), i % 2, offset_bits<W>());
        }
    }
}

// A row's sums times `added`
template <class W> inline ints pair_sum(const block_factors & with, const rounded_256 & row) {
    const int16_t * sums = W::PER_SCALE == 16 ? row.sums16 : row.sums32;
    ints sum = {};
    for (uint32_t i = 0; i < PAIRS<W>; ++i) {
        sum += times(with.added[i], sums + 2 * i);
    }
    return sum;
}

// Adds a block's sums of integers, times their scale, to the sums in `out`. Floats are added nowhere else.
inline void add_integers(ints integers, floats scale, const rounded_256 & row, float * out) {
    store(out, fused(__builtin_convertvector(integers, floats), scale * all(row.scale), load<floats>(out)));
}

// Adds a block to the sums in `out`. in_block: its sums of integers
template <class W, class FORM>
inline void add_block(const block_factors & weights, ints in_block, const rounded_256 & row, float * out) {
    if constexpr (W::MINIMA) {
        add_integers(pair_sum<W>(weights, row), weights.pair_scale, row, out);
    } else if constexpr (HAS_PAIRS<W, FORM>) {
        in_block -= pair_sum<W>(weights, row);
    }
    add_integers(in_block, weights.scale, row, out);
}

// With as many groups as go together
template <class W, uint32_t N>
void multiply(const group<form_of_many<W>> * weights, const rounded_rows<rounded_256> & x, float * out) {
    using form = form_of_many<W>;
    constexpr uint32_t G = form::MOST_GROUPS;
    constexpr uint32_t VECTORS = W::PER_SCALE / 4;
    constexpr uint32_t TOGETHER = vectors_of_sum<W, form>(VECTORS);
    ints sum[N][G] = {};
    for (uint32_t s = 0; s < BLOCK / W::PER_SCALE; ++s) {
#pragma GCC unroll 8
        for (uint32_t first = s * VECTORS; first < (s + 1) * VECTORS; first += TOGETHER) {
            typename form::sum part[N][G] = {};
            add_vectors<form, TOGETHER>(part, x, first, [&](uint32_t g) { return weights[g].numbers + first; });
#pragma GCC unroll 8
            for (uint32_t r = 0; r < N; ++r) {
#pragma GCC unroll 8
                for (uint32_t g = 0; g < G; ++g) {
                    sum[r][g] += form::scaled(part[r][g], SCALED<W> ? weights[g].factors.by[s] : once());
                }
            }
        }
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < N; ++r) {
#pragma GCC unroll 8
        for (uint32_t g = 0; g < G; ++g) {
            add_block<W, form>(weights[g].factors, sum[r][g], x.block(r), out + r * TILE + g * LANES);
        }
    }
}

// One row, with weights as they are unpacked.
template <class W> void multiply_one(const weight_rows & weights, const rounded_rows<rounded_256> & x, float * out) {
    using form = form_of_one<W>;
    constexpr uint32_t TOGETHER = vectors_of_sum<W, form>(4);
    block_factors factors;
    unpack_factors<W, form>(factors, weights);
    ints sum = {};
    W::numbers(weights, [&](uint32_t first, const words(&four)[4]) __attribute__((always_inline)) {
        for (uint32_t i = 0; i < 4; i += TOGETHER) {
            typename form::sum part = {};
            for (uint32_t j = i; j < i + TOGETHER; ++j) {
                form::add_products(part, form::store(four[j]), x.four(0, first + j));
            }
            sum += form::scaled(part, SCALED<W> ? factors.by[first * 4 / W::PER_SCALE] : once());
        }
    });
    add_block<W, form>(factors, sum, x.block(0), out);
}

template <class W> void unpack(group<form_of_many<W>> & to, const weight_rows & rows) {
    using form = form_of_many<W>;
    unpack_factors<W, form>(to.factors, rows);
    W::numbers(rows, [&](uint32_t first, const words(&four)[4]) __attribute__((always_inline)) {
        for (uint32_t j = 0; j < 4; ++j) {
            to.numbers[first + j] = form::store(four[j]);
        }
    });
}

template <class W>
void multiply_many(const tile<form_of_many<W>> & weights, const rounded_rows<rounded_256> & x, uint32_t n_rows, sums * out) {
    using form = form_of_many<W>;
    by<form::MOST_ROWS>(n_rows, [&](auto n, uint32_t r) {
        for (uint32_t g = 0; g < GROUPS; g += form::MOST_GROUPS) {
            multiply<W, n>(&weights.groups[g], x.from(r), out[r] + g * LANES);
        }
    });
}

// Up to how many rows are multiplied by weights as they lie, row after row of them, where an instruction set has that.
template <class W, class = void> constexpr uint32_t ROWS_AS_IT_LIES = 0;
template <class W, uint32_t N>
void multiply_as_it_lies(const weight_rows & weights, const rounded_rows<rounded_256> & x, uint32_t n_blocks, float * out);

template <class W> void run(const product_job & job, uint32_t begin, uint32_t end) {
    constexpr uint32_t MOST = ROWS_AS_IT_LIES<W>;
    tile<form_of_many<W>> unpacked;
    const size_t stride = row_bytes<rounded_256>(job.n_in);
    run_tiles<tile_rows>(
        job, begin, end, stride,
        [&](const tile_rows & weights, const uint8_t * rows, uint32_t n_rows, sums * out) {
            if constexpr (MOST > 0) {
                if (n_rows <= MOST) {
                    by<MOST>(n_rows, [&](auto n, uint32_t) {
                        for (uint32_t g = 0; g < GROUPS; ++g) {
                            multiply_as_it_lies<W, n>(weights.group(g), {rows, rows + job.n_in, stride}, job.n_in / BLOCK,
                                                      out[0] + g * LANES);
                        }
                    });
                    return;
                }
            }
            for (uint32_t b = 0; b < job.n_in / BLOCK; ++b) {
                const tile_rows block = weights.from(b * W::BYTES);
                weights.fetch_behind<W::BYTES>(b * W::BYTES);
                const rounded_rows<rounded_256> x = {rows + b * BLOCK, rows + job.n_in + b * sizeof(rounded_256), stride};
#pragma GCC unroll 8
                for (uint32_t g = 0; g < GROUPS; ++g) {
                    if (n_rows == 1) {
                        multiply_one<W>(block.group(g), x, out[0] + g * LANES);
                    } else {
                        unpack<W>(unpacked.groups[g], block.group(g));
                    }
                }
                if (n_rows > 1) {
                    multiply_many<W>(unpacked, x, n_rows, out);
                }
            }
        },
        job.n_rows > MOST);
}

} // namespace in_256

} // namespace

} // namespace kvg::KVG_PRODUCTS
