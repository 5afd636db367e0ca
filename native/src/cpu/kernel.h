// What the CPU does instead of ggml's operations, compiled for each instruction set: attention, rows of the cache, states (cpu/recur.h),
// feed-forwards (cpu/feed_forward.h), norms (cpu/norm.h).
//
// Attention is over a cache in host memory, K and V a row per cell.
//
// Cells are cut into chunks, and each query goes over them with a running maximum and sum: online softmax (Milakov and Gimelshein 2018).
// Ranges of cells are summed up by themselves and then added up in order, the split-K form of it (Dao et al. 2023), so that threads can
// share a query out. Every K and V row is read once for all query heads that share it, and cells that a token doesn't see aren't read.
//
// What a token gets depends, to the bit, on the cells that it sees in their order, and on nothing else: not on where they are, the cells
// between them, the other tokens or the threads. Ranges are by the number of cells seen (graph/seen_ranges.h), maxima are powers of two, by
// which floats are multiplied exactly, and within a range each sum adds up its terms in the order of cells.
#pragma once

#include <cstddef>
#include <cstdint>

#include <ggml.h>

#include "cpu/feed_forward.h"
#include "cpu/norm.h"
#include "cpu/recur.h"

namespace kvg {

// Rows of a tensor in the cache, by heads.
struct attend_rows {
    const uint8_t * data;
    size_t cell_stride; // bytes
    size_t head_stride;
    ggml_type type;
};

// How heads of K are rotated.
struct head_rotation {
    uint32_t head_dim;
    uint32_t n_pairs;    // of rotated dimensions
    bool neox;           // a pair's dimensions are n_pairs apart, else neighbours
    uint32_t offset = 0; // of the first rotated dimension
};

// The cells that wait, and how queries are rotated for them: in the opposite direction, so that K can stay as it is. In each chunk a query
// is rotated once for all cells with the same rotation.
struct attend_rotations {
    const uint32_t * of_cell; // (n_kv): which rotation, from 1; 0: the cell doesn't wait. nullptr when no cell waits
    const float * tables;     // for each rotation n_pairs cosines, then n_pairs sines
    head_rotation how;        // of padded heads
    uint32_t mixed;           // the size of the Walsh-Hadamard matrix by which queries are mixed; 0: they are not
};

struct attend_job {
    const float * q; // (head_dim_k, n_head, n_tokens)
    attend_rows k;   // (head_dim_k, n_head_kv, n_kv)
    attend_rows v;   // (head_dim_v, n_head_kv, n_kv)
    // The same for cells from n_fresh on, where rows of two types are in two places; old_k.data nullptr: all
    // are in k and v
    attend_rows old_k;
    attend_rows old_v;
    uint32_t n_fresh;
    const uint32_t * order; // (n_kv): which cell each column of the mask is; nullptr: as they lie
    const uint16_t * mask;  // (n_kv, n_tokens): -infinity where a token doesn't see a cell
    const float * sinks;    // (n_head): one more score for each head, of a cell whose V is 0; nullptr for none
    float * out;            // (head_dim_v, n_head, n_tokens)
    float scale;
    const float * slopes; // (n_head), ALiBi: what scores lose for each position between a token and a cell; nullptr: nothing
    const int32_t * cell_positions;  // (n_kv), by columns; this and the next one beside slopes alone
    const int32_t * token_positions; // (n_tokens)
    float soft_cap;                  // scaled scores become soft_cap * tanh(score / soft_cap); 0: none
    uint32_t head_dim_k;
    uint32_t head_dim_v;
    uint32_t n_head;
    uint32_t n_head_kv;
    uint32_t n_tokens;
    uint32_t n_kv;
    const uint32_t * range_begins; // (n_tokens, ranges + 1): the first column of each range; nullptr: there is one
    attend_rotations waiting;
    // (n_kv), by columns: what each cell gets of the tokens' attention is added; nullptr: they attend. Else `partial` has what finish() left there.
    float * shares;
    bool peaks; // not added: the highest that any of the tokens' heads gives a cell
};

// What is worked on at a time: some tokens' query heads of one KV head over some ranges of cells.
struct attend_unit {
    uint32_t token_begin;
    uint32_t token_end; // at most ATTEND_TOKENS further
    uint32_t head_kv;
    uint32_t range;
    uint32_t range_end;
};

// All static: compiled for AVX-512 somewhere, none of them may become everybody's.
static constexpr uint32_t attend_padded(uint32_t head_dim) { return (head_dim + 15) / 16 * 16; }
// Floats of a head's partial result: its sum of V, padded; its sums of weights, by lanes; the power of two to which these are relative.
static constexpr uint32_t attend_partial_floats(uint32_t head_dim_v) { return attend_padded(head_dim_v) + 32; }
// Cells at a time, and tokens of a unit, whose rows and queries of one head stay in L1 or L2.
constexpr uint32_t ATTEND_CHUNK = 128;
constexpr uint16_t ATTEND_HIDDEN = 0xfc00; // -infinity in F16: a mask has it for a cell that a token doesn't see
constexpr uint32_t ATTEND_TOKENS = 16;
// Floats of scratch that a thread needs: queries of a unit, rows of a chunk that were converted, its K by dimensions, and a partial result.
static constexpr uint32_t attend_scratch_floats(uint32_t head_dim_k, uint32_t head_dim_v, uint32_t group) {
    return (ATTEND_TOKENS * group + 2 * ATTEND_CHUNK) * attend_padded(head_dim_k) + ATTEND_CHUNK * attend_padded(head_dim_v) +
           ATTEND_TOKENS * group * attend_partial_floats(head_dim_v);
}

struct softmax_parts {
    uint32_t best; // the first of the greatest; anything when sum is NaN
    float greatest;
    float sum;
};

// Attention, and the softmax over logits.
struct attend_kernel {
    // partial: attend_partial_floats() for each token of the unit and query head of its KV head: all of its ranges, added up in order
    void (*run)(const attend_job & job, const attend_unit & unit, float * partial, float * scratch);
    // partial += what another unit made of the next range. The unit's own range doesn't matter, here and below.
    void (*add)(const attend_job & job, const attend_unit & unit, float * partial, const float * added);
    // The partial result of all ranges becomes `out`. It keeps the maximum and the sum of all weights.
    void (*finish)(const attend_job & job, const attend_unit & unit, float * partial);
    // The greatest of n numbers, and the sum of e^(x - greatest): what a softmax is made of, NaN if any is. n >= 1
    softmax_parts (*softmax)(const float * x, uint32_t n);
};

// Rows of the cache, and what a K-shift does to them.
struct row_kernel {
    // A row of a cache type as floats, and back, rounded. x: room for n rounded up to 16
    void (*to_floats)(ggml_type type, const void * row, float * x, uint32_t n);
    void (*from_floats)(ggml_type type, const float * x, void * row, uint32_t n);
    // table: n_pairs cosines, then n_pairs sines
    void (*rotate)(float * x, uint32_t n_heads, const head_rotation & how, const float * table);
    // Each piece of `size` floats times a Walsh-Hadamard matrix (memory/hadamard.h). size: a power of two from 4 on
    void (*mix)(float * x, size_t n, uint32_t size);
};

// States of recurrent layers.
struct recur_kernel {
    // Channels [begin, end), whole vectors
    void (*convolve)(const convolve_job & job, uint32_t begin, uint32_t end);
    // [begin, end) of n_head * head_dim_v / RECUR_ROWS
    void (*recall)(const recall_job & job, uint32_t begin, uint32_t end);
    // x divided by its length, the square root of its squares and eps; n numbers, whole vectors
    void (*to_unit)(const float * x, float * out, uint32_t n, float eps);
    void (*pass_gate)(const gated_row & row);
    // The same as recall for a piece, runs of many tokens by chunks. Vectors divide head_dim_v, too. scratch: recall_scratch_floats()
    void (*recall_by_chunks)(const recall_job & job, const recall_piece & piece, float * scratch);
};

// The code for one instruction set.
struct cpu_kernels {
    const char * name;
    uint32_t lanes; // floats of a vector
    attend_kernel attend;
    row_kernel rows;
    recur_kernel recur;
    feed_forward_kernel feed_forward;
    norm_kernel norm;
};

// The best that this CPU runs for heads of a size: vectors that divide it read F16 rows where they are.
const cpu_kernels & kernels_for_heads(uint32_t head_dim_k, uint32_t head_dim_v);
// The best that this CPU runs with vectors that divide a width, which is a multiple of 4: for states.
const cpu_kernels & kernels_for_width(uint32_t width);
// All that this CPU runs, the best first; nullptr after the last.
const cpu_kernels * const * kernels_here();

} // namespace kvg
