// Runs of rows over tiles of weights. Included by what multiplies with some instruction set, which has its own TILE rows of weights:
//   ROWS(first, stride, ahead)   rows that are `stride` bytes apart, whose followers `ahead` bytes further on are fetched meanwhile
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/products.h"

namespace kvg {

namespace {

constexpr uint32_t TILE = PRODUCT_TILE;
constexpr uint32_t MANY = 128; // rows at a time, whose sums stay in L1
constexpr size_t AHEAD = 4096; // bytes that are fetched before they are needed, at least: memory takes longer than a small tile

using sums = float[TILE]; // of one row with each row of weights

// multiply(weights, rows, n_rows, out) adds what up to MANY rows give with a tile.
template <class ROWS, class F> class tiles {
public:
    tiles(const product_job & job, size_t stride, F multiply) : job_(job), stride_(stride), multiply_(multiply) {}

    void run(uint32_t begin, uint32_t end) {
        const uint32_t last = job_.n_out < end * TILE ? job_.n_out : end * TILE;
        uint32_t out = begin * TILE;
        for (; out + TILE <= last; out += TILE) {
            tile({row(out), job_.weight_stride, ahead()}, out, 0, TILE);
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
    size_t ahead() const {
        const size_t of_tile = TILE * job_.weight_stride;
        return (AHEAD + of_tile - 1) / of_tile * of_tile;
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
