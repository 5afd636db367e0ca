// Runs of rows over tiles of weights. Included by what multiplies with some instruction set, which has its own TILE rows of weights:
//   ROWS(first, stride, width, next)   rows of `width` bytes that are `stride` bytes apart, before others that are `next` bytes further on
//   ROWS::STREAM                       how many bytes of rows it reads one after the other,
//   ROWS::STREAMED_ROWS                with up to so many rows of floats: results of a row lie in fewer lines of memory without.
// Its fetch(offset) brings what is at this offset of all rows nearer. Functions that only do such a thing are always in line: GCC takes them
// for functions without effects, and leaves calls out.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/products.h"

namespace kvg {

namespace {

constexpr uint32_t TILE = PRODUCT_TILE;
constexpr uint32_t MANY = 128;    // rows at a time, whose sums stay in L1
constexpr uint32_t TOGETHER = 16; // rows that are multiplied at once, at most; by AMX, twice as many

using sums = float[TILE]; // of one row with each row of weights

// Where a kernel that is at some offset of a tile's rows fetches from, beside where it is: further on in these rows, or in those of the next
// tile.
constexpr size_t AHEAD_IN_ROW = 1024;
inline size_t fetched_at(size_t offset, size_t width, size_t next) {
    const size_t there = offset + (AHEAD_IN_ROW < width ? AHEAD_IN_ROW : width);
    return there < width ? there : there - width + next;
}

// Whether 16 rows that are so far apart begin in at most four places of a first-level cache, each of which has room for 8.
inline bool meet_in_cache(size_t stride) {
    constexpr size_t LINES = 4096 / 64; // then places are the same again
    return stride / 64 % (LINES / 4) == 0;
}

// The products of up to N rows. multiply(weights, rows, n_rows, out) adds them for a tile.
//
// A CPU fetches streams of memory by itself, but one of each page: 16 neighbours of some hundred bytes are none. So rows of a tile are apart.
// Each begins a stream of rows, and the tiles that follow go on in it. by_streams: not where a tile's rows are read one by one
template <class ROWS, uint32_t N, class F> class tiles {
public:
    tiles(const product_job & job, bool by_streams, F multiply) : job_(job), by_streams_(by_streams), multiply_(multiply) {}

    void run(uint32_t begin, uint32_t end) {
        const uint32_t last = job_.n_out < end * TILE ? job_.n_out : end * TILE;
        uint32_t out = begin * TILE;
        const uint32_t n = n_together((last - out) / TILE);
        if (out + TILE <= last) {
            begin_with({row(out), n * job_.weight_stride, job_.weight_stride, 0});
        }
        while (out + TILE <= last) {
            const uint32_t left = (last - out) / TILE;
            out += together(out, n < left ? n : left);
        }
        const size_t width = job_.weight_stride;
        if (out < last && job_.n_out >= TILE) { // with rows that have been in another tile
            tile({row(last - TILE), width, width, 0}, {out, 1, TILE - (last - out), last - out});
        } else {
            for (; out < last; ++out) {
                tile({row(out), 0, width, 0}, {out, 1, 0, 1});
            }
        }
    }

private:
    // Where results of rows of weights go: those of n of them, from `skipped` on, to outputs that are `apart`.
    struct outputs {
        uint32_t first;
        uint32_t apart;
        uint32_t skipped;
        uint32_t n;
    };

    // Of n tiles, how many go through the same streams.
    uint32_t n_together(uint32_t n) const {
        constexpr size_t STREAM = ROWS::STREAM;
        const uint32_t most = STREAM > 2 * job_.weight_stride ? static_cast<uint32_t>(STREAM / job_.weight_stride) : 1;
        for (uint32_t n_groups = (n + most - 1) / most; by_streams_ && n_groups < n; ++n_groups) {
            const uint32_t each = (n + n_groups - 1) / n_groups;
            if (!meet_in_cache(each * job_.weight_stride)) {
                return each;
            }
        }
        return 1;
    }
    // n tiles; returns how many outputs they have.
    uint32_t together(uint32_t out, uint32_t n) {
        const size_t width = job_.weight_stride;
        for (uint32_t i = 0; i < n; ++i) {
            const bool is_last = i + 1 == n; // before tiles that are most often this thread's, too
            const bool any = !is_last || out + 2 * n * TILE <= job_.n_out;
            tile({row(out + i), n * width, width, any ? (is_last ? n * TILE - i : 1) * width : 0}, {out + i, n, 0, TILE});
        }
        return n * TILE;
    }
    const uint8_t * row(uint32_t out) const { return job_.weights + out * job_.weight_stride; }
    [[gnu::always_inline]] void begin_with(const ROWS & weights) const {
        for (size_t offset = 0; offset < AHEAD_IN_ROW && offset < job_.weight_stride; offset += 64) {
            weights.fetch(offset);
        }
    }
    void tile(const ROWS & weights, const outputs & to) {
        std::memset(sums_, 0, job_.n_rows * sizeof(sums));
        multiply_(weights, job_.rows, job_.n_rows, sums_);
        for (uint32_t r = 0; r < job_.n_rows; ++r) {
            write(r, to);
        }
    }
    // Whole tiles that lie as they were summed up are a few vectors.
    [[gnu::always_inline]] void write(uint32_t r, const outputs & to) const {
        const size_t first = size_t{r} * job_.n_out + to.first;
        if (to.n == TILE && to.apart == 1) {
            sums all;
            std::memcpy(all, sums_[r], sizeof(all));
            if (job_.added) {
                sums added;
                std::memcpy(added, job_.added + first, sizeof(added));
                for (uint32_t k = 0; k < TILE; ++k) {
                    all[k] += added[k];
                }
            }
            std::memcpy(job_.out + first, all, sizeof(all));
            return;
        }
        for (uint32_t k = 0; k < to.n; ++k) {
            const size_t at = first + size_t{k} * to.apart;
            const float sum = sums_[r][to.skipped + k];
            job_.out[at] = job_.added ? sum + job_.added[at] : sum;
        }
    }

    alignas(64) sums sums_[N];
    const product_job & job_;
    bool by_streams_;
    F multiply_;
};

// Up to N rows at a time with all tiles, so that rows stay in L2; whole TOGETHER, as long as there are.
template <class ROWS, uint32_t N = MANY, class F>
inline void run_tiles(const product_job & job, uint32_t begin, uint32_t end, size_t stride, F multiply,
                      bool by_streams = true) {
    const uint32_t n_parts = (job.n_rows + N - 1) / N;
    const uint32_t each = n_parts == 0 ? 0 : ((job.n_rows + n_parts - 1) / n_parts + TOGETHER - 1) / TOGETHER * TOGETHER;
    for (uint32_t r = 0; r < job.n_rows; r += each) {
        product_job some = job;
        some.rows += r * stride;
        some.out += size_t{r} * job.n_out;
        some.added = job.added ? job.added + size_t{r} * job.n_out : nullptr;
        some.n_rows = std::min(job.n_rows - r, each);
        tiles<ROWS, N, F>(some, by_streams && job.n_rows <= ROWS::STREAMED_ROWS, multiply).run(begin, end);
    }
}

} // namespace

} // namespace kvg
