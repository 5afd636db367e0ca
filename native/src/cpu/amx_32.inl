// Products of many rows with weights in blocks of 32, by AMX. Included after vnni_32.inl.
#include "cpu/amx.inl"

namespace kvg::products_vnni {

namespace {

using amx_32 = amx_registers<BLOCK>;
static_assert(BLOCK * 127 * 128 < MOST_ON_LARGE); // a sum of a block's products

// Where the scales of a block of 16 rows are: of block 0, then of the next one after each advance().
class blocks_of_square {
public:
    explicit blocks_of_square(const rounded_rows & x) : stride_(x.stride), stride3_(3 * x.stride) {
        for (uint32_t i = 0; i < 4; ++i) {
            fours_[i] = x.block(4 * i, 0);
        }
        asm("" : "+r"(stride3_)); // else it would be multiplied again
    }
    [[gnu::always_inline]] const uint8_t * of(uint32_t row) const {
        const uint8_t * first = fours_[row / 4];
        return row % 4 == 3 ? first + stride3_ : first + row % 4 * stride_;
    }
    [[gnu::always_inline]] void advance() {
        for (const uint8_t *& four : fours_) {
            four += sizeof(rounded_32);
            asm("" : "+r"(four)); // else there would be a pointer for each row, and too few registers
        }
    }

private:
    const uint8_t * fours_[4]; // rows 0, 4, 8 and 12
    size_t stride_;
    size_t stride3_;
};

template <int I>
[[gnu::always_inline]] inline void multiply_block(const tile & weights, const rounded_rows & x, uint32_t b, square & to) {
    amx_32::load<4 + I>(x.at(0, b), x.stride);
    amx_32::load<6 + I>(weights.numbers[b].at, sizeof(__m512i));
    amx_32::begin<I>();
    amx_32::multiply<I, 4 + I, 6 + I>();
    amx_32::store<I>(to);
}

// Sums of 16 rows go on by their products with a block.
template <form FORM>
[[gnu::always_inline]] inline void add_block(__m512 * sum, const square & products, const block_scales & scales,
                                             blocks_of_square & blocks) {
#pragma GCC unroll 16
    for (uint32_t r = 0; r < SQUARE; ++r) {
        sum[r] = with_products<FORM>(sum[r], from_large(products.of[r]), scales, blocks.of(r));
    }
    blocks.advance();
}

// Products of 16 rows with a tile: block by block, each while the sums of the one before go on.
template <form FORM> void multiply_square(const tile & weights, uint32_t n_blocks, const rounded_rows & x, sums * out) {
    square products[2];
    blocks_of_square blocks(x);
    __m512 sum[SQUARE];
#pragma GCC unroll 16
    for (uint32_t r = 0; r < SQUARE; ++r) {
        sum[r] = _mm512_load_ps(out[r]);
    }
    multiply_block<0>(weights, x, 0, products[0]);
    uint32_t b = 0;
    for (; b + 2 < n_blocks; b += 2) {
        multiply_block<1>(weights, x, b + 1, products[1]);
        add_block<FORM>(sum, products[0], weights.scales[b], blocks);
        multiply_block<0>(weights, x, b + 2, products[0]);
        add_block<FORM>(sum, products[1], weights.scales[b + 1], blocks);
    }
    if (b + 1 < n_blocks) {
        multiply_block<1>(weights, x, b + 1, products[1]);
    }
    add_block<FORM>(sum, products[0], weights.scales[b], blocks);
    if (b + 1 < n_blocks) {
        add_block<FORM>(sum, products[1], weights.scales[b + 1], blocks);
    }
#pragma GCC unroll 16
    for (uint32_t r = 0; r < SQUARE; ++r) {
        _mm512_store_ps(out[r], sum[r]);
    }
}

// Rows of whole squares by AMX, those that are left over by VNNI: first, as it takes numbers as they are unpacked.
template <class W>
void multiply_piece_by_amx(tile & scratch, const piece<W> & weights, const rounded_rows & x, uint32_t n_rows, sums * out) {
    static_assert(W::FORM != HALVES); // of which a block would have two sums
    unpack(scratch, weights);
    const uint32_t in_squares = n_rows / SQUARE * SQUARE;
    by_eights(n_rows - in_squares, [&](auto n, uint32_t i) {
        const uint32_t r = in_squares + i;
        multiply_tile<W::FORM, n>(scratch, weights.n_blocks, x.from(r), out + r);
    });
    if constexpr (W::FORM == RAISED) {
        for (uint32_t b = 0; b < weights.n_blocks; ++b) {
            for (__m512i & four : scratch.numbers[b].at) {
                four = _mm512_xor_si512(four, bytes(0x80)); // numbers with signs again
            }
        }
    }
    for (uint32_t r = 0; r < in_squares; r += SQUARE) {
        multiply_square<W::FORM>(scratch, weights.n_blocks, x.from(r), out + r);
    }
}

template <class W> void run_by_amx(const product_job & job, uint32_t begin, uint32_t end) {
    if (job.n_rows < SQUARE) {
        return run<W>(job, begin, end);
    }
    const amx_32 registers;
    run_pieces<W, MANY_BY_AMX>(job, begin, end, multiply_piece_by_amx<W>);
}

} // namespace

} // namespace kvg::products_vnni
