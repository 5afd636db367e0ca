// How positions turn K of each layer, and the cosines and sines of that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <ggml-backend.h>

#include "cpu/kernel.h"
#include "memory/kv_group.h"
#include "model/layer_spec.h"
#include "shift/settle.h"

namespace kvg {

constexpr size_t MAX_SHIFT_SCRATCH = 16u << 20; // bytes of rows outside the cache at a time

// What the model's file says of frequencies, (n_rot / 2) on each device; empty when it says nothing.
using device_factors = std::map<ggml_backend_dev_t, ggml_tensor *>;

// Of one layer.
struct rotation {
    rope_params rope;           // n_rot 0: K is the same at every position
    ggml_tensor * freq_factors; // (n_rot / 2) on the device of the layer's cells, or nullptr
    const hadamard * mixed;     // the matrix that K's heads were multiplied by before they were quantized, or nullptr

    bool turns() const { return rope.n_rot > 0; }
    // for the CPU's kernel: heads of so many floats
    head_rotation heads_of(uint32_t head_dim) const {
        return {head_dim, static_cast<uint32_t>(rope.n_rot) / 2, rope.mode == GGML_ROPE_TYPE_NEOX};
    }
};

// Of the group's layers, by their numbers in the model; those of other groups have none. layers: all of the model's
std::vector<rotation> rotations_of(const kv_group & group, const std::vector<layer_spec> & layers,
                                   const device_factors & factors);

// Cosines and sines as attend_kernel::rotate takes them. Layers whose K turns alike share theirs.
class turn_tables {
public:
    // type: of the rows, on which depends what their dithers are
    turn_tables(const std::vector<turn> & turns, ggml_type type) : turns_(turns), type_(type) {}

    // n_pairs cosines, then as many sines, of each turn; nullptr for a layer whose K doesn't turn. Made when first asked for.
    const float * of(const rotation & how);

private:
    std::vector<turn> turns_;
    ggml_type type_;
    std::vector<std::pair<rotation, std::vector<float>>> tables_;
};

} // namespace kvg
