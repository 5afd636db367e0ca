#include "shift/cpu_rotation.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "fault.h"
#include "model/rope.h"

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

head_rotation head_rotation_of(const kv_group & group, const rope_params & params, bool padded) {
    return {padded ? attend_padded(group.spec().head_dim_k) : group.spec().head_dim_k, static_cast<uint32_t>(params.n_rot) / 2,
            params.mode == GGML_ROPE_TYPE_NEOX};
}

void add_turn(std::vector<float> & turns, int32_t by, const std::vector<double> & angles, const dither_step & step) {
    for (size_t i = 0; i < 2 * angles.size(); ++i) {
        const size_t pair = i % angles.size();
        const double angle = by * angles[pair] + (step.angles.empty() ? 0.0f : step.angles[pair]);
        turns.push_back(static_cast<float>(step.gain * (i < angles.size() ? std::cos(angle) : std::sin(angle))));
    }
}

cpu_rotation::cpu_rotation(const kv_group & group, const std::vector<uint32_t> & cells, const rotation & how, int n_threads,
                           bool dithers)
    : kernel_(*attend_kernels_here()[0]), type_(group.types().k), width_(group.spec().n_head_kv * group.spec().head_dim_k),
      n_heads_(group.spec().n_head_kv), shape_(head_rotation_of(group, how.params, false)), mixed_(how.mixed),
      n_threads_(n_threads), cells_(cells), scratch_(static_cast<size_t>(n_threads) * attend_padded(width_)) {
    list_turns(group, how, dithers);
}

void cpu_rotation::list_turns(const kv_group & group, const rotation & how, bool dithers) {
    const class cells & cells = group.cells();
    const std::vector<double> angles = rope_angles(how.freq_factors, how.params);
    const uint8_t next = cells.next_dither(cells_);
    std::map<std::pair<int32_t, uint8_t>, uint32_t> known; // most cells wait for the same
    for (const uint32_t i : cells_) {
        const int32_t by = shift_of(cells, i);
        const auto [turn, is_new] = known.try_emplace({by, cells.dither(i)}, static_cast<uint32_t>(known.size()));
        if (is_new) {
            const uint8_t dither = cells.dither(i);
            const uint8_t to = dithers ? dither_after(dither, next) : dither;
            add_turn(turns_, by, angles, step_dither(dither, to, type_, shape_.n_pairs));
        }
        which_.push_back(turn->second);
    }
}

void cpu_rotation::rotate(size_t i, void * row, int thread) {
    float * x = scratch_.data() + static_cast<size_t>(thread) * attend_padded(width_);
    kernel_.to_floats(type_, row, x, width_);
    if (mixed_) { // positions turn pairs of dimensions, which a Hadamard matrix has mixed
        mixed_->apply(x, width_);
    }
    rotate_floats(i, x);
    if (mixed_) {
        mixed_->apply(x, width_);
    }
    kernel_.from_floats(type_, x, row, width_);
}

void cpu_rotation::rotate_floats(size_t i, float * x) const {
    kernel_.rotate(x, n_heads_, shape_, turns_.data() + size_t{which_[i]} * 2 * shape_.n_pairs);
}

ggml_tensor * cpu_rotation::node(ggml_context * ctx, ggml_tensor * k) {
    return ggml_map_custom1_inplace(ctx, k, compute, n_threads_, this);
}

} // namespace kvg
