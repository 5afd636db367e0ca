// Tiles of weights, and runs of rows over them. Included behind the vectors of an instruction set.
#include <type_traits>

namespace kvg::KVG_PRODUCTS {

namespace {

constexpr uint32_t TILE = PRODUCT_TILE;
constexpr uint32_t GROUPS = TILE / LANES;
constexpr uint32_t MANY = 128; // rows at a time, whose sums stay in L1
constexpr size_t AHEAD = 4096; // bytes that are fetched before they are needed, at least: memory takes longer than a small tile

using sums = float[TILE]; // of one row with each row of weights

// The same place in LANES rows of weights.
struct weight_rows {
    const uint8_t * const * rows;
    size_t place;

    const uint8_t * at(size_t row) const { return rows[row] + place; }
    floats halves(size_t offset) const {
        uint16_t all[LANES];
        for (size_t i = 0; i < LANES; ++i) {
            all[i] = load<uint16_t>(at(i) + offset);
        }
        return of_halves(all);
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

// The same place in all rows of a tile. The last one stands in for those that are missing.
struct tile_rows {
    const uint8_t * const * rows;
    size_t place;
    size_t ahead; // bytes to the rows of a later tile, which are fetched meanwhile

    tile_rows from(size_t offset) const { return {rows, place + offset, ahead}; }
    weight_rows group(size_t g) const { return {rows + g * LANES, place}; }
    void fetch(size_t offset) const {
        for (size_t i = 0; i < TILE; ++i) {
            __builtin_prefetch(rows[i] + place + offset + ahead, 0, 2);
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

// multiply(weights, rows, n_rows, out) adds what up to MANY rows give with a tile.
template <class F> inline void run_tiles(const product_job & job, uint32_t begin, uint32_t end, size_t stride, F multiply) {
    alignas(64) sums out[MANY];
    const size_t of_tile = TILE * job.weight_stride;
    for (uint32_t first = begin * TILE; first < end * TILE; first += TILE) {
        const uint32_t n_out = job.n_out - first < TILE ? job.n_out - first : TILE;
        const uint8_t * places[TILE];
        for (uint32_t i = 0; i < TILE; ++i) {
            places[i] = job.weights + (first + (i < n_out ? i : n_out - 1)) * job.weight_stride;
        }
        const tile_rows weights = {places, 0, (AHEAD + of_tile - 1) / of_tile * of_tile};
        for (uint32_t row = 0; row < job.n_rows; row += MANY) {
            const uint32_t n = job.n_rows - row < MANY ? job.n_rows - row : MANY;
            std::memset(out, 0, n * sizeof(sums));
            multiply(weights, job.rows + row * stride, n, out);
            for (uint32_t r = 0; r < n; ++r) {
                std::memcpy(job.out + size_t{row + r} * job.n_out + first, out[r], n_out * sizeof(float));
            }
        }
    }
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

// Rounded rows, from some block on.
template <class B> struct rounded_rows {
    const uint8_t * numbers;
    const uint8_t * blocks;
    size_t stride;

    rounded_rows from(uint32_t row) const { return {numbers + row * stride, blocks + row * stride, stride}; }
    // Numbers 4j to 4j + 3
    words four(uint32_t row, size_t j) const { return all(load<uint32_t>(numbers + row * stride + j * 4)); }
    const B & block(uint32_t row, size_t b = 0) const {
        return *reinterpret_cast<const B *>(blocks + row * stride + b * sizeof(B));
    }
};

} // namespace

} // namespace kvg::KVG_PRODUCTS
