// Runs of rows over tiles of weights. Included by what multiplies with some instruction set, which has its own TILE rows of weights:
//   ROWS(first, stride, next)   rows that are `stride` bytes apart, before others that are `next` bytes further on
// Its fetch(offset) brings what is at this offset of all rows nearer. Functions that only do such a thing are always in line: GCC takes them
// for functions without effects, and leaves calls out.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/products.h"

namespace kvg {

namespace {

constexpr uint32_t TILE = PRODUCT_TILE;
constexpr uint32_t MANY = 128; // rows at a time, whose sums stay in L1
constexpr size_t AHEAD = 4096; // bytes that are fetched before they are needed

using sums = float[TILE]; // of one row with each row of weights

// Where a kernel that is at some offset of a tile's rows fetches from, beside where it is: further on in these rows, or in those of the next
// tile. The latter may be another thread's, so that each of its runs begins with nothing fetched: the distance is short.
constexpr size_t AHEAD_IN_ROW = 1024;
inline size_t fetched_at(size_t offset, size_t stride, size_t next) {
    const size_t there = offset + (AHEAD_IN_ROW < stride ? AHEAD_IN_ROW : stride);
    return there < stride ? there : there - stride + next;
}

// multiply(weights, rows, n_rows, out) adds what up to MANY rows give with a tile.
template <class ROWS, class F> class tiles {
public:
    tiles(const product_job & job, size_t stride, F multiply) : job_(job), stride_(stride), multiply_(multiply) {}

    void run(uint32_t begin, uint32_t end) {
        const uint32_t last = job_.n_out < end * TILE ? job_.n_out : end * TILE;
        uint32_t out = begin * TILE;
        if (out + TILE <= last) {
            begin_with({row(out), job_.weight_stride, 0});
        }
        for (; out + TILE <= last; out += TILE) {
            tile({row(out), job_.weight_stride, out + 2 * TILE <= last ? TILE * job_.weight_stride : 0}, out, 0, TILE);
        }
        if (out < last && job_.n_out >= TILE) { // with rows that have been in another tile
            tile({row(last - TILE), job_.weight_stride, 0}, out, TILE - (last - out), last - out);
        } else {
            for (; out < last; ++out) {
                tile({row(out), 0, 0}, out, 0, 1);
            }
        }
    }

private:
    const uint8_t * row(uint32_t out) const { return job_.weights + out * job_.weight_stride; }
    [[gnu::always_inline]] void begin_with(const ROWS & weights) const {
        for (size_t offset = 0; offset < AHEAD_IN_ROW && offset < job_.weight_stride; offset += 64) {
            weights.fetch(offset);
        }
    }
    // What n of these rows of weights give, from `skipped` on, is for n outputs.
    void tile(const ROWS & weights, uint32_t out, uint32_t skipped, uint32_t n) {
        for (uint32_t r = 0; r < job_.n_rows; r += MANY) {
            const uint32_t n_rows = job_.n_rows - r < MANY ? job_.n_rows - r : MANY;
            std::memset(sums_, 0, n_rows * sizeof(sums));
            multiply_(weights, job_.rows + r * stride_, n_rows, sums_);
            for (uint32_t i = 0; i < n_rows; ++i) {
                std::memcpy(job_.out + size_t{r + i} * job_.n_out + out, sums_[i] + skipped, n * sizeof(float));
            }
        }
    }

    alignas(64) sums sums_[MANY];
    const product_job & job_;
    size_t stride_; // of rounded rows
    F multiply_;
};

template <class ROWS, class F>
inline void run_tiles(const product_job & job, uint32_t begin, uint32_t end, size_t stride, F multiply) {
    tiles<ROWS, F>(job, stride, multiply).run(begin, end);
}

} // namespace

} // namespace kvg
