// Products of weights in floats, by AVX-512.
//
// A row of weights and one of numbers have 16 sums, each of every 16th product, or of every 16th pair of them, and these are added in the end.
// So it is for any number of rows.
//
// A type of weights is a struct W with
//   weight, number   of a row of weights, and of one of numbers
//   STEP             how many numbers go into the sums at once
//   load(from)       STEP weights, for add; load(from, n): n of them, and zeros
//   row(from)        STEP numbers, likewise
//   add(sum, w, x)
#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "cpu/products.h"

namespace kvg::products_float {

namespace {

constexpr uint32_t TALL = 4; // rows of weights at a time
constexpr uint32_t WIDE = 6; // rows of numbers at a time: 24 sums have a register each
constexpr size_t CACHED =
    384 * 1024; // bytes of rows of numbers that are multiplied with all weights before others are: they stay in L2

// Four sums of 16 lanes
inline __m128 sums_of_lanes(const __m512 * v) {
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512 four = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee)); // in each 128 bits
    const __m256 two =
        _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_castps512_ps256(_mm512_shuffle_f32x4(four, four, 0x0e)));
    return _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
}

// Four rows of weights. The last one stands in for those that are missing.
template <class W> struct weight_rows {
    const typename W::weight * at[TALL];
    uint32_t n;

    weight_rows(const product_job & job, uint32_t first) : n(job.n_out - first < TALL ? job.n_out - first : TALL) {
        for (uint32_t i = 0; i < TALL; ++i) {
            const size_t row = first + (i < n ? i : n - 1);
            at[i] = reinterpret_cast<const typename W::weight *>(job.weights + row * job.weight_stride);
        }
    }
};

// What N rows of numbers give with M rows of weights, as 16 sums each
template <class W, uint32_t N, uint32_t M>
[[gnu::always_inline]] inline void add_products(uint32_t n_in, size_t ahead, const typename W::weight * const * w,
                                                const typename W::number * const * x, __m512 (*sum)[M]) {
    const auto add = [&](auto load, auto row) __attribute__((always_inline)) {
        decltype(load(w[0])) weights[M];
        for (uint32_t i = 0; i < M; ++i) {
            weights[i] = load(w[i]);
        }
        for (uint32_t r = 0; r < N; ++r) {
            const auto numbers = row(x[r]);
            for (uint32_t i = 0; i < M; ++i) {
                sum[r][i] = W::add(sum[r][i], weights[i], numbers);
            }
        }
    };
    uint32_t k = 0;
    for (; k + W::STEP <= n_in; k += W::STEP) {
        if (N > 1 && N < WIDE && k % (64 / sizeof(typename W::weight)) == 0) {
            for (uint32_t i = 0; i < M; ++i) {
                _mm_prefetch(reinterpret_cast<const char *>(w[i] + k) + ahead, _MM_HINT_T1);
            }
        }
        add([&](const auto * from) { return W::load(from + k); }, [&](const auto * from) { return W::row(from + k); });
    }
    if (const uint32_t n = n_in - k; n > 0) {
        add([&](const auto * from) { return W::load(from + k, n); }, [&](const auto * from) { return W::row(from + k, n); });
    }
}

// N rows of numbers with four rows of weights. out: of the first row of numbers
template <class W, uint32_t N>
inline void multiply(const product_job & job, const weight_rows<W> & w, const typename W::number * const * x, float * out) {
    __m512 sum[N][TALL];
    for (uint32_t r = 0; r < N; ++r) {
        for (uint32_t i = 0; i < TALL; ++i) {
            sum[r][i] = _mm512_setzero_ps();
        }
    }
    add_products<W, N, TALL>(job.n_in, TALL * job.weight_stride, w.at, x, sum);
    for (uint32_t r = 0; r < N; ++r) {
        __m128 four = sums_of_lanes(sum[r]);
        float * to = out + size_t{r} * job.n_out;
        if (job.added) {
            __m128 added = _mm_setzero_ps();
            std::memcpy(&added, job.added + (to - job.out), w.n * sizeof(float));
            four = _mm_add_ps(four, added);
        }
        std::memcpy(to, &four, w.n * sizeof(float));
    }
}

// n rows of numbers, at most N
template <class W, uint32_t N>
inline void multiply_few(uint32_t n, const product_job & job, const weight_rows<W> & w, const typename W::number * const * x,
                         float * out) {
    if constexpr (N > 0) {
        if (n == N) {
            return multiply<W, N>(job, w, x, out);
        }
        multiply_few<W, N - 1>(n, job, w, x, out);
    }
}

// One row of numbers with rows [first, last) of weights. It waits for memory, which a CPU fetches by itself where each page is read in its order.
// A row's sums wait for each other, so that two are added to at a time, each in a half of the weights.
template <class W> void run_one(const product_job & job, uint32_t first, uint32_t last) {
    const uint32_t half = (last - first + 1) / 2;
    const auto * x = reinterpret_cast<const typename W::number *>(job.rows);
    for (uint32_t i = 0; i < half; i += 2) {
        uint32_t rows[2][2];
        __m512 sums[TALL];
        for (uint32_t k = 0; k < 2; ++k) {
            const typename W::weight * w[2];
            for (uint32_t h = 0; h < 2; ++h) {
                const uint32_t row = first + h * half + i + k;
                rows[h][k] = row < last ? row : last - 1; // which is computed twice, then
                w[h] = reinterpret_cast<const typename W::weight *>(job.weights + rows[h][k] * job.weight_stride);
            }
            __m512 two[1][2] = {{_mm512_setzero_ps(), _mm512_setzero_ps()}};
            add_products<W, 1, 2>(job.n_in, 0, w, &x, two);
            sums[k] = two[0][0];
            sums[2 + k] = two[0][1];
        }
        alignas(16) float results[TALL];
        _mm_store_ps(results, sums_of_lanes(sums));
        for (uint32_t h = 0; h < 2; ++h) {
            for (uint32_t k = 0; k < 2; ++k) {
                const uint32_t row = rows[h][k];
                job.out[row] = job.added ? results[2 * h + k] + job.added[row] : results[2 * h + k];
            }
        }
    }
}

template <class W> void run(const product_job & job, uint32_t begin, uint32_t end) {
    const size_t of_row = job.n_in * sizeof(typename W::number);
    const auto cached = static_cast<uint32_t>(CACHED / of_row) / WIDE * WIDE;
    const uint32_t at_once = cached > WIDE ? cached : WIDE;
    const uint32_t last = job.n_out < end * PRODUCT_TILE ? job.n_out : end * PRODUCT_TILE;
    if (job.n_rows == 1) {
        return run_one<W>(job, begin * PRODUCT_TILE, last);
    }
    for (uint32_t rows = 0; rows < job.n_rows; rows += at_once) {
        const uint32_t stop = job.n_rows - rows < at_once ? job.n_rows : rows + at_once;
        for (uint32_t out = begin * PRODUCT_TILE; out < last; out += TALL) {
            const weight_rows<W> w(job, out);
            for (uint32_t row = rows; row < stop; row += WIDE) {
                const uint32_t n = stop - row < WIDE ? stop - row : WIDE;
                const typename W::number * x[WIDE];
                for (uint32_t r = 0; r < n; ++r) {
                    x[r] = reinterpret_cast<const typename W::number *>(job.rows + (row + r) * of_row);
                }
                multiply_few<W, WIDE>(n, job, w, x, job.out + size_t{row} * job.n_out + out);
            }
        }
    }
}

inline __mmask16 first(uint32_t n) { return static_cast<__mmask16>((1u << n) - 1); }

} // namespace

} // namespace kvg::products_float
