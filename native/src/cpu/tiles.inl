// Tiles of weights, and runs of rows over them. Included behind the vectors of an instruction set.
#include <cstddef>
#include <cstdint>

#include "cpu/tile_runs.inl"

namespace kvg::KVG_PRODUCTS {

namespace {

constexpr uint32_t GROUPS = TILE / LANES;

// The same place in LANES rows of weights.
struct weight_rows {
    const uint8_t * fours[LANES / 4]; // rows 0, 4: an instruction adds 0 to 3 strides itself
    size_t stride;

    const uint8_t * at(size_t row) const { return fours[row / 4] + row % 4 * stride; }
    floats halves(size_t offset) const {
        return of_halves([&](size_t i) { return load<int16_t>(at(i) + offset); });
    }
    // Of each row 4 bytes, 2, 1
    words word(size_t offset) const { return words_of<uint32_t>(offset); }
    words half_word(size_t offset) const { return words_of<uint16_t>(offset); }
    words byte(size_t offset) const { return words_of<uint8_t>(offset); }
    // Of each row 16 bytes: word i of all rows is vector i.
    void turned(size_t offset, words * four) const {
        sixteen of_row[LANES];
        for (size_t i = 0; i < LANES; ++i) {
            of_row[i] = load<sixteen>(at(i) + offset);
        }
        turn(of_row, four);
    }

private:
    template <class T> words words_of(size_t offset) const {
        words all;
        for (size_t i = 0; i < LANES; ++i) {
            all[i] = load<T>(at(i) + offset);
        }
        return all;
    }
};

// The same place in all rows of a tile.
struct tile_rows {
    // Of 1.5 to 37 KB the best on Zen 3. With a page, Q8_0 is read at 20 GB/s in place of 22 by each of two threads, and 640 numbers of a
    // row at 15 in place of 21: 16 streams that are nearly a page apart begin in few places of a cache.
    static constexpr size_t STREAM = 14000;
    static constexpr uint32_t STREAMED_ROWS = MANY;

    const uint8_t * first;
    size_t stride;
    size_t width; // bytes of a row
    size_t next;  // bytes to the rows of the next tile, or 0

    tile_rows from(size_t offset) const { return {first + offset, stride, width, next}; }
    weight_rows group(size_t g) const {
        weight_rows rows;
        for (size_t i = 0; i < LANES / 4; ++i) {
            rows.fours[i] = first + (g * LANES + i * 4) * stride;
        }
        rows.stride = stride;
        return rows;
    }
    [[gnu::always_inline]] void fetch(size_t offset) const {
        for (size_t i = 0; i < TILE; ++i) {
            __builtin_prefetch(first + i * stride + offset, 0, 2);
        }
    }
    // What is read later than this offset, of which rows have N bytes. Not for from().
    template <size_t N> [[gnu::always_inline]] void fetch_behind(size_t offset) const {
        for (size_t line = 0; line < N; line += 64) {
            fetch(fetched_at(offset + line, width, next));
        }
    }
};

// Vectors of W's bytes whose products are added before anything else is done with them, up to `limit`.
template <class W, class FORM> constexpr uint32_t vectors_of_sum(uint32_t limit) {
    uint32_t n = 0;
    if constexpr (W::SIGNED) {
        n = FORM::vectors(128);
    } else {
        n = FORM::vectors(W::MOST);
    }
    return n < limit ? n : limit;
}

// Calls f(n, r) for rows r to r + n, n being a constant: N as often as there are so many, then all that are left.
template <uint32_t N, class F> inline void by(uint32_t n_rows, F f, uint32_t r = 0) {
    for (; r + N <= n_rows; r += N) {
        f(std::integral_constant<uint32_t, N>(), r);
    }
    if constexpr (N > 1) {
        by<N - 1>(n_rows, f, r);
    }
}

// For a FORM with TWO_ROWS, of which the last may be left over: squares have sums of two rows with a group.
template <class FORM, uint32_t COUNT, uint32_t N, uint32_t G, class X, class F>
[[gnu::always_inline]] inline void add_of_two_rows(typename FORM::sum (&to)[N][G], const X & x, uint32_t first, F weights) {
    typename FORM::square squares[N / 2][G] = {};
#pragma GCC unroll 8
    for (uint32_t j = 0; j < COUNT; j += 2) {
#pragma GCC unroll 8
        for (uint32_t g = 0; g < G; ++g) {
            const auto two = FORM::together(weights(g)[j], weights(g)[j + 1]);
#pragma GCC unroll 8
            for (uint32_t r = 0; r + 1 < N; r += 2) {
                FORM::add_products(squares[r / 2][g], two, x.eight(r, first + j), x.eight(r + 1, first + j));
            }
        }
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r + 1 < N; r += 2) {
#pragma GCC unroll 8
        for (uint32_t g = 0; g < G; ++g) {
            FORM::add_square(to[r][g], to[r + 1][g], squares[r / 2][g]);
        }
    }
}

// Rounded rows, from some block on.
template <class B> struct rounded_rows {
    const uint8_t * numbers;
    const uint8_t * blocks;
    size_t stride;

    rounded_rows from(uint32_t row) const { return {numbers + row * stride, blocks + row * stride, stride}; }
    // Numbers 4j to 4j + 3
    words four(uint32_t row, size_t j) const { return all(load<uint32_t>(numbers + row * stride + j * 4)); }
    // and the next four
    uint64_t eight(uint32_t row, size_t j) const { return load<uint64_t>(numbers + row * stride + j * 4); }
    const B & block(uint32_t row, size_t b = 0) const {
        return *reinterpret_cast<const B *>(blocks + row * stride + b * sizeof(B));
    }
};

// Sums of N rows with G groups of weights go on by COUNT vectors, the rows' from `first` on. weights(g): a group's vectors
template <class FORM, uint32_t COUNT, uint32_t N, uint32_t G, class B, class F>
[[gnu::always_inline]] inline void add_vectors(typename FORM::sum (&to)[N][G], const rounded_rows<B> & x, uint32_t first,
                                               F weights) {
    uint32_t alone = 0; // rows from here on have no other beside them
    if constexpr (FORM::TWO_ROWS && N > 1) {
        add_of_two_rows<FORM, COUNT>(to, x, first, weights);
        alone = N / 2 * 2;
    }
#pragma GCC unroll 8
    for (uint32_t j = 0; j < COUNT; ++j) {
#pragma GCC unroll 8
        for (uint32_t r = alone; r < N; ++r) {
            const words four = x.four(r, first + j);
#pragma GCC unroll 8
            for (uint32_t g = 0; g < G; ++g) {
                FORM::add_products(to[r][g], weights(g)[j], four);
            }
        }
    }
}

} // namespace

} // namespace kvg::KVG_PRODUCTS
