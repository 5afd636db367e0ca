// x86 with AVX-512 VNNI.
#ifdef __x86_64__
#include "cpu/vnni.inl"

namespace kvg::products_vnni {

namespace {

constexpr uint32_t BLOCK = 32;  // numbers with one scale
constexpr size_t BYTES = 34;    // of a block of Q8_0: an F16 scale, 32 numbers
constexpr uint32_t CHUNK = 512; // weights of a row at a time: a turned tile of them stays in L1

// A block of a rounded row, beside its 32 numbers.
struct rounded_scale {
    float scale;
    int32_t lift; // -128 times the sum of the numbers: weights are raised by 128
};

// Where the scales of a rounded row of n begin: behind its numbers, which are read 64 at a time.
size_t scales_at(uint32_t n) { return (size_t{n} + 63) / 64 * 64; }
size_t row_bytes(uint32_t n) { return scales_at(n) + n / BLOCK * sizeof(rounded_scale); }

// Blocks of 16 rows of weights.
struct piece {
    weight_rows rows;
    uint32_t n_blocks;

    // Numbers raised by 128: those of block b of a row, and of the block behind it, or anything where there is none.
    __m512i pair(uint32_t row, uint32_t b) const {
        const uint8_t * first = rows.at[row] + b * BYTES;
        const uint8_t * second = b + 1 < n_blocks ? first + BYTES : first;
        rows.fetch(row, b * BYTES);
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(first + 2));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(second + 2));
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        return _mm512_xor_si512(both, _mm512_set1_epi8(static_cast<char>(0x80)));
    }
    // of block b of each row
    __m512 scales(uint32_t b) const { return rows.halves(b * BYTES); }
};

// Rounded rows, from some block on.
struct rounded_rows {
    const uint8_t * numbers;
    const uint8_t * scales;
    size_t stride;

    rounded_rows from(uint32_t row) const { return {numbers + row * stride, scales + row * stride, stride}; }
    const uint8_t * at(uint32_t row, uint32_t b) const { return numbers + row * stride + b * BLOCK; }
    rounded_scale scale(uint32_t row, uint32_t b) const {
        return load<rounded_scale>(scales + row * stride + b * sizeof(rounded_scale));
    }
};

// One row's sum goes on by a block. Here alone floats are added.
inline __m512 add_block(__m512 sum, __m512i in_block, __m512 weight_scales, float scale) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(in_block), _mm512_mul_ps(weight_scales, _mm512_set1_ps(scale)), sum);
}

// N rows with weights as they lie: each row of weights gives a vector of sums, and those of 16 are folded into one.
template <uint32_t N> void multiply_few(const piece & weights, const rounded_rows & x, sums * out) {
    __m512 sum[N];
    for (uint32_t r = 0; r < N; ++r) {
        sum[r] = _mm512_load_ps(out[r]);
    }
    for (uint32_t b = 0; b < weights.n_blocks; b += 2) {
        __m512i fours[N][4];
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; ++i) {
            const __m512i w[4] = {weights.pair(4 * i, b), weights.pair(4 * i + 1, b), weights.pair(4 * i + 2, b),
                                  weights.pair(4 * i + 3, b)};
            for (uint32_t r = 0; r < N; ++r) {
                const __m512i numbers = _mm512_loadu_si512(x.at(r, b));
                const auto times = [&](int k) { return _mm512_dpbusd_epi32(_mm512_setzero_si512(), w[k], numbers); };
                const __m512i v[4] = {times(0), times(1), times(2), times(3)};
                fours[r][i] = folded(v);
            }
        }
        const uint32_t n = b + 1 < weights.n_blocks ? 2 : 1;
        const __m512 scales[2] = {weights.scales(b), weights.scales(b + n - 1)};
        for (uint32_t r = 0; r < N; ++r) {
            const __m512i left = halved(fours[r][0], fours[r][1]);
            const __m512i right = halved(fours[r][2], fours[r][3]);
            const __m512i whole[2] = {_mm512_shuffle_i32x4(left, right, 0x88), _mm512_shuffle_i32x4(left, right, 0xdd)};
            for (uint32_t i = 0; i < n; ++i) {
                const rounded_scale s = x.scale(r, b + i);
                sum[r] = add_block(sum[r], _mm512_add_epi32(whole[i], _mm512_set1_epi32(s.lift)), scales[i], s.scale);
            }
        }
    }
    for (uint32_t r = 0; r < N; ++r) {
        _mm512_store_ps(out[r], sum[r]);
    }
}

// 16 rows of weights, turned: vector j of a block has numbers 4j to 4j + 3 of each row.
struct tile {
    alignas(64) int32_t numbers[CHUNK / 4][TILE];
    alignas(64) float scales[CHUNK / BLOCK][TILE];
    uint32_t n_blocks;
};

void turn(tile & to, const piece & from) {
    to.n_blocks = from.n_blocks;
    for (uint32_t b = 0; b < from.n_blocks; b += 2) {
        __m512i r[16];
        for (uint32_t i = 0; i < TILE; ++i) {
            r[i] = from.pair(i, b);
        }
        for (uint32_t i = b; i < b + 2 && i < from.n_blocks; ++i) {
            _mm512_store_ps(to.scales[i], from.scales(i));
        }
        transpose(r);
        for (uint32_t j = 0; j < 16; ++j) {
            _mm512_store_si512(to.numbers[b * 8 + j], r[j]);
        }
    }
}

// N rows with a turned tile: a vector of weights meets four bytes of each row.
template <uint32_t N> void multiply(const tile & weights, const rounded_rows & x, sums * out) {
    __m512 sum[N];
    for (uint32_t r = 0; r < N; ++r) {
        sum[r] = _mm512_load_ps(out[r]);
    }
    for (uint32_t b = 0; b < weights.n_blocks; ++b) {
        __m512i in_block[N];
        for (uint32_t r = 0; r < N; ++r) {
            in_block[r] = _mm512_set1_epi32(x.scale(r, b).lift);
        }
        for (uint32_t j = 0; j < 8; ++j) {
            const __m512i numbers = _mm512_load_si512(weights.numbers[b * 8 + j]);
            for (uint32_t r = 0; r < N; ++r) {
                in_block[r] = _mm512_dpbusd_epi32(in_block[r], numbers, _mm512_set1_epi32(load<int32_t>(x.at(r, b) + j * 4)));
            }
        }
        const __m512 scales = _mm512_load_ps(weights.scales[b]);
        for (uint32_t r = 0; r < N; ++r) {
            sum[r] = add_block(sum[r], in_block[r], scales, x.scale(r, b).scale);
        }
    }
    for (uint32_t r = 0; r < N; ++r) {
        _mm512_store_ps(out[r], sum[r]);
    }
}

void multiply_piece(tile & turned, const piece & weights, const rounded_rows & x, uint32_t n_rows, sums * out) {
    switch (n_rows) {
    case 1:
        return multiply_few<1>(weights, x, out);
    case 2:
        return multiply_few<2>(weights, x, out);
    case 3:
        return multiply_few<3>(weights, x, out);
    default: // turning pays
        turn(turned, weights);
        by_eights(n_rows, [&](auto n, uint32_t r) { multiply<n>(turned, x.from(r), out + r); });
    }
}

void run(const product_job & job, uint32_t begin, uint32_t end) {
    tile turned;
    const size_t stride = row_bytes(job.n_in);
    run_tiles(job, begin, end, stride, [&](const weight_rows & weights, const uint8_t * rows, uint32_t n, sums * out) {
        for (uint32_t in = 0; in < job.n_in; in += CHUNK) {
            const uint32_t b = in / BLOCK;
            const uint32_t n_blocks = (job.n_in - in < CHUNK ? job.n_in - in : CHUNK) / BLOCK;
            const uint8_t * scales = rows + scales_at(job.n_in) + b * sizeof(rounded_scale);
            multiply_piece(turned, {weights.from(b * BYTES), n_blocks}, {rows + in, scales, stride}, n, out);
        }
    });
}

// Within -127 and 127, whatever x is.
inline __m512i rounded(__m512 x, __m512 factor) {
    return _mm512_max_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x, factor)), _mm512_set1_epi32(-127));
}

void round_row(const float * x, uint8_t * row, uint32_t n) {
    uint8_t * scales = row + scales_at(n);
    for (uint32_t i = 0; i < n; i += BLOCK) {
        const __m512 low = _mm512_loadu_ps(x + i);
        const __m512 high = _mm512_loadu_ps(x + i + 16);
        const bool any_nan = _mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q) != 0;
        const float most = any_nan ? NAN : _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
        const __m512 factor = _mm512_set1_ps(most != 0 ? 127 / most : 0);
        const __m512i a = rounded(low, factor);
        const __m512i b = rounded(high, factor);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(row + i), _mm512_cvtepi32_epi8(a));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(row + i + 16), _mm512_cvtepi32_epi8(b));
        // in F16 between, as ggml keeps it
        const rounded_scale kept = {_cvtsh_ss(_cvtss_sh(most / 127, 0)),
                                    -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(a, b))};
        std::memcpy(scales + i / BLOCK * sizeof(kept), &kept, sizeof(kept));
    }
}

} // namespace

static const row_form form = {row_bytes, round_row};
extern const product_kernel q8_0;
const product_kernel q8_0 = {form, run};

} // namespace kvg::products_vnni
#endif
