// How K of each layer is rotated by its position, and tables of the cosines and sines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <ggml-backend.h>

#include "cpu/kernel.h"
#include "memory/kv_group.h"
#include "model/layer_spec.h"
#include "model/weights.h"
#include "shift/settle.h"

namespace kvg {

constexpr size_t MAX_SHIFT_SCRATCH = 16u << 20; // the most bytes of rows that are copied out of the cache at a time

// How K of one layer is rotated.
struct layer_rotation {
    rope_params rope;           // n_rot 0: K is the same at every position
    ggml_tensor * freq_factors; // (n_rot / 2) on the device of the layer's cells, or nullptr
    const hadamard * mixed;     // the matrix by which heads of K are mixed before they are quantized, or nullptr

    // whether K depends on the position at all
    bool rotates() const { return rope.n_rot > 0; }
    // for the CPU's kernel. head_dim: floats of a head, with padding if it has any
    head_rotation heads_of(uint32_t head_dim) const {
        return {head_dim, static_cast<uint32_t>(rope.n_rot) / 2, rope.mode == GGML_ROPE_TYPE_NEOX,
                static_cast<uint32_t>(rope.offset)};
    }
};

// An entry for each layer of the model. Only the entries of the group's layers are filled in. layers: all of the model's
std::vector<layer_rotation> rotations_of(const kv_group & group, const std::vector<layer_spec> & layers,
                                         const device_factors & factors);

// Cosines and sines as row_kernel::rotate takes them. Layers that rotate K by the same angles share a table.
class rotation_tables {
public:
    // type: of the rows; the size of their dithers depends on it
    rotation_tables(const std::vector<row_rotation> & rotations, ggml_type type) : rotations_(rotations), type_(type) {}

    // For each rotation n_pairs cosines, then n_pairs sines. nullptr for a layer whose K is not rotated. The table is made at the
    // first call.
    const float * of(const layer_rotation & how);

private:
    std::vector<row_rotation> rotations_;
    ggml_type type_;
    std::vector<std::pair<layer_rotation, std::vector<float>>> tables_;
};

} // namespace kvg
