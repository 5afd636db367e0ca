// Rows of K in host memory rotated by the CPU, in any cache type: read as floats, turned, rounded again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/kernel.h"
#include "memory/kv_group.h"
#include "model/hparams.h"
#include "parallel.h"
#include "shift/dither.h"

namespace kvg {

constexpr size_t MAX_SHIFT_SCRATCH = 16u << 20; // bytes of rows outside the cache at a time

// By what K turns, beside positions.
struct rotation {
    const rope_params & params;
    ggml_tensor * freq_factors; // (n_rot / 2) or nullptr
    const hadamard * mixed;     // or nullptr
};

// The shift of a cell, unless a fault for tests rotates it the other way.
int32_t shift_of(const cells & cells, uint32_t i);

// K's heads as the CPU turns them. padded: where each has room for whole vectors
head_rotation head_rotation_of(const kv_group & group, const rope_params & params, bool padded);

// Adds the cosines and sines of a turn by so many positions, as attend_kernel::rotate takes them. angles: of a position
void add_turn(std::vector<float> & turns, int32_t by, const std::vector<double> & angles, const dither_step & step);

class cpu_rotation {
public:
    // Of these cells, which wait. how: as on any device; dithers: false where nothing will be rounded
    cpu_rotation(const kv_group & group, const std::vector<uint32_t> & cells, const rotation & how, int n_threads,
                 bool dithers = true);

    const std::vector<uint32_t> & cells() const { return cells_; }
    // The i-th of them, whose row is given. thread: whose scratch it may use, below n_threads
    void rotate(size_t i, void * row, int thread);
    // The n cells from the first-th on, shared out among the threads. row(i): where the row of the i-th of the n lies
    template <class F> void rotate_all(size_t first, size_t n, F row) {
        const auto n_threads = static_cast<size_t>(n_threads_);
        parallel_for(n_threads, n_threads, [&](size_t thread) {
            for (size_t i = thread; i < n; i += n_threads) {
                rotate(first + i, row(i), static_cast<int>(thread));
            }
        });
    }
    // As rotate() for a row of floats that no Hadamard matrix has mixed.
    void rotate_floats(size_t i, float * x) const;
    // The node that rotates all of them in a tensor of the CPU's group. It must not outlive this.
    ggml_tensor * node(ggml_context * ctx, ggml_tensor * k);

private:
    void list_turns(const kv_group & group, const rotation & how, bool dithers);

    const attend_kernel & kernel_;
    ggml_type type_;
    uint32_t width_; // of a row
    uint32_t n_heads_;
    head_rotation shape_;
    const hadamard * mixed_;
    int n_threads_;
    std::vector<uint32_t> cells_;
    std::vector<uint32_t> which_; // turn, of each
    std::vector<float> turns_;    // one for each shift and dither that occur
    std::vector<float> scratch_;  // a padded row for each thread
};

} // namespace kvg
