#include "graph/cpu_rotation.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "fault.h"
#include "graph/rope.h"

namespace kvg {

namespace {

void compute(ggml_tensor * dst, const ggml_tensor *, int ith, int nth, void * self) {
    auto & rotation = *static_cast<cpu_rotation *>(self);
    const std::vector<uint32_t> & cells = rotation.cells();
    for (size_t i = static_cast<size_t>(ith); i < cells.size(); i += static_cast<size_t>(nth)) {
        rotation.rotate(i, static_cast<uint8_t *>(dst->data) + cells[i] * dst->nb[1], ith);
    }
}

} // namespace

int32_t shift_of(const cells & cells, uint32_t i) { return fault_active("shift-sign") ? -cells.shift(i) : cells.shift(i); }

cpu_rotation::cpu_rotation(const kv_cache & cache, const rotation & how, int n_threads)
    : kernel_(*attend_kernels_here()[0]), type_(cache.type_k()), width_(cache.n_head_kv() * cache.head_dim()),
      n_heads_(cache.n_head_kv()),
      shape_{cache.head_dim(), static_cast<uint32_t>(how.params.n_rot) / 2, how.params.mode == GGML_ROPE_TYPE_NEOX},
      mixed_(how.mixed), n_threads_(n_threads), scratch_(static_cast<size_t>(n_threads) * attend_padded(width_)) {
    list_cells(cache, how);
}

void cpu_rotation::list_cells(const kv_cache & cache, const rotation & how) {
    const class cells & cells = cache.cells();
    const std::vector<double> angles = rope_angles(how.freq_factors, how.params);
    // other noise each time: errors that go to and fro with a cell would else add up
    const uint32_t salt = cells.n_shifts() * 0x9e3779b1u;
    std::map<int32_t, uint32_t> known; // most cells wait for the same
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        if (cells.shift(i) == 0) {
            continue;
        }
        const int32_t by = shift_of(cells, i);
        const auto [turn, is_new] = known.emplace(by, static_cast<uint32_t>(known.size()));
        for (size_t j = 0; j < (is_new ? 2 * angles.size() : 0); ++j) {
            const double angle = by * angles[j % angles.size()];
            turns_.push_back(static_cast<float>(j < angles.size() ? std::cos(angle) : std::sin(angle)));
        }
        cells_.push_back(i);
        which_.push_back(turn->second);
        // the first rounding is as good as it can be; only when they are repeated they can add up
        seeds_.push_back(cells.turned(i) ? int64_t{static_cast<uint32_t>(cells.pos(i)) ^ salt} : -1);
    }
}

// Of a row's bytes, 64 bits at a time. A saved row may come back to a cache where no K-shift was counted yet: without it the same
// position would have the same noise again.
static uint32_t digest(const void * row, size_t n_bytes) {
    uint64_t h = n_bytes;
    for (size_t i = 0; i + sizeof(h) <= n_bytes; i += sizeof(h)) {
        uint64_t word = 0;
        memcpy(&word, static_cast<const uint8_t *>(row) + i, sizeof(word));
        h = (h ^ word) * 0x9e3779b97f4a7c15u;
        h ^= h >> 32;
    }
    return static_cast<uint32_t>(h);
}

void cpu_rotation::rotate(size_t i, void * row, int thread) {
    const uint32_t seed = seeds_[i] < 0 ? 0 : static_cast<uint32_t>(seeds_[i]) ^ digest(row, ggml_row_size(type_, width_));
    float * x = scratch_.data() + static_cast<size_t>(thread) * attend_padded(width_);
    kernel_.to_floats(type_, row, x, width_);
    if (mixed_) { // positions turn pairs of dimensions, which a Hadamard matrix has mixed
        mixed_->apply(x, width_);
    }
    kernel_.rotate(x, n_heads_, shape_, turns_.data() + size_t{which_[i]} * 2 * shape_.n_pairs);
    if (mixed_) {
        mixed_->apply(x, width_);
    }
    if (seeds_[i] >= 0) {
        kernel_.add_noise(x, width_, seed, type_);
    }
    kernel_.from_floats(type_, x, row, width_);
}

ggml_tensor * cpu_rotation::node(ggml_context * ctx, ggml_tensor * k) {
    return ggml_map_custom1_inplace(ctx, k, compute, n_threads_, this);
}

} // namespace kvg
