#include "graph/cpu_rotation.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>

#include "fault.h"
#include "graph/rope.h"

namespace kvg {

namespace {

constexpr uint32_t STILL = std::numeric_limits<uint32_t>::max();

void compute(ggml_tensor * dst, const ggml_tensor *, int ith, int nth, void * self) {
    auto & rotation = *static_cast<cpu_rotation *>(self);
    const std::vector<uint32_t> & cells = rotation.cells();
    for (size_t i = static_cast<size_t>(ith); i < cells.size(); i += static_cast<size_t>(nth)) {
        rotation.rotate(i, static_cast<uint8_t *>(dst->data) + cells[i] * dst->nb[1], ith);
    }
}

} // namespace

int32_t turned(int32_t by) { return fault_active("shift-sign") ? -by : by; }

std::vector<row_turn> turns_in_place(const cells & cells) {
    std::vector<row_turn> turns;
    const uint8_t next = cells.next_dither();
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        if (cells.turns_in_place(i)) {
            turns.push_back({i, turned(cells.shift(i)), cells.dither(i), dither_after(cells.dither(i), next)});
        }
    }
    return turns;
}

cpu_rotation::cpu_rotation(const kv_cache & cache, const rotation & how, const std::vector<row_turn> & turns, int n_threads)
    : kernel_(*attend_kernels_here()[0]), type_(cache.type_k()), width_(cache.n_head_kv() * cache.head_dim()),
      n_heads_(cache.n_head_kv()),
      shape_{cache.head_dim(), static_cast<uint32_t>(how.params.n_rot) / 2, how.params.mode == GGML_ROPE_TYPE_NEOX},
      mixed_(how.mixed), n_threads_(n_threads), scratch_(static_cast<size_t>(n_threads) * attend_padded(width_)) {
    const std::vector<double> angles = rope_angles(how.freq_factors, how.params);
    std::map<std::tuple<int32_t, uint8_t, uint8_t>, uint32_t> known; // most cells wait for the same
    for (const row_turn & turn : turns) {
        cells_.push_back(turn.cell);
        if (turn.by == 0 && (turn.from == turn.to || std::max(turn.from, turn.to) < 2)) {
            which_.push_back(STILL);
            continue;
        }
        const auto [found, is_new] = known.try_emplace({turn.by, turn.from, turn.to}, static_cast<uint32_t>(known.size()));
        if (is_new) {
            add_sines(turn.by, angles, step_dither(turn.from, turn.to, type_, shape_.n_pairs));
        }
        which_.push_back(found->second);
    }
}

void cpu_rotation::add_sines(int32_t by, const std::vector<double> & angles, const dither_step & step) {
    for (size_t i = 0; i < 2 * angles.size(); ++i) {
        const size_t pair = i % angles.size();
        const double angle = by * angles[pair] + (step.angles.empty() ? 0.0f : step.angles[pair]);
        sines_.push_back(static_cast<float>(step.gain * (i < angles.size() ? std::cos(angle) : std::sin(angle))));
    }
}

const float * cpu_rotation::sines_of(size_t i) const { return sines_.data() + size_t{which_[i]} * 2 * shape_.n_pairs; }

void cpu_rotation::rotate_floats(size_t i, float * row, int thread) {
    if (which_[i] == STILL) {
        return;
    }
    float * x = scratch_.data() + static_cast<size_t>(thread) * attend_padded(width_);
    std::copy_n(row, width_, x);
    kernel_.rotate(x, n_heads_, shape_, sines_of(i));
    std::copy_n(x, width_, row);
}

void cpu_rotation::rotate(size_t i, void * row, int thread) {
    if (which_[i] == STILL) {
        return;
    }
    float * x = scratch_.data() + static_cast<size_t>(thread) * attend_padded(width_);
    kernel_.to_floats(type_, row, x, width_);
    if (mixed_) { // positions turn pairs of dimensions, which a Hadamard matrix has mixed
        mixed_->apply(x, width_);
    }
    kernel_.rotate(x, n_heads_, shape_, sines_of(i));
    if (mixed_) {
        mixed_->apply(x, width_);
    }
    kernel_.from_floats(type_, x, row, width_);
}

ggml_tensor * cpu_rotation::node(ggml_context * ctx, ggml_tensor * k) {
    return ggml_map_custom1_inplace(ctx, k, compute, n_threads_, this);
}

} // namespace kvg
