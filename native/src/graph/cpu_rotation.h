// Rows of K in host memory rotated by the CPU, in any cache type: read as floats, turned, rounded again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attend/kernel.h"
#include "cache/kv_cache.h"
#include "graph/dither.h"
#include "model/hparams.h"

namespace kvg {

constexpr size_t MAX_SHIFT_SCRATCH = 16u << 20; // bytes of rows outside the cache at a time

// By what K turns, beside positions.
struct rotation {
    const rope_params & params;
    ggml_tensor * freq_factors; // (n_rot / 2) or nullptr
    const hadamard * mixed;     // or nullptr
};

// What happens to one row of K.
struct row_turn {
    uint32_t cell;
    int32_t by;   // positions
    uint8_t from; // dither
    uint8_t to;
};

// By this many positions, unless a fault for tests rotates K the other way.
int32_t turned(int32_t by);
// Of the cells that wait and lie where they are rotated from.
std::vector<row_turn> turns_in_place(const cells & cells);

class cpu_rotation {
public:
    // how: as on any device
    cpu_rotation(const kv_cache & cache, const rotation & how, const std::vector<row_turn> & turns, int n_threads);

    const std::vector<uint32_t> & cells() const { return cells_; }
    int n_threads() const { return n_threads_; }
    // The i-th of them, whose row is given, or what it is rotated from. thread: whose scratch it may use, below n_threads()
    void rotate(size_t i, void * row, int thread);
    // The same of a row that was read as floats.
    void rotate_floats(size_t i, float * row, int thread);
    // The node that rotates all of them in a tensor of the CPU's cache. It must not outlive this.
    ggml_tensor * node(ggml_context * ctx, ggml_tensor * k);

private:
    const float * sines_of(size_t i) const;
    // Cosines and sines of a turn. angles: of a position
    void add_sines(int32_t by, const std::vector<double> & angles, const dither_step & step);

    const attend_kernel & kernel_;
    ggml_type type_;
    uint32_t width_; // of a row
    uint32_t n_heads_;
    head_rotation shape_;
    const hadamard * mixed_;
    int n_threads_;
    std::vector<uint32_t> cells_;
    std::vector<uint32_t> which_; // turn, of each, or STILL
    std::vector<float> sines_;    // one for each shift and dither that occur, as attend_kernel::rotate takes it
    std::vector<float> scratch_;  // a padded row for each thread
};

} // namespace kvg
