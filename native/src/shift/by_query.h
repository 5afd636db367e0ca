// Attention over waiting cells: it reads their K as it is stored, and rotates the queries in the opposite direction.
//
// q . R(s)k = R(-s)q . k, where R(s) rotates by s positions. So K is not rounded again: a quantized K keeps its bytes when a context
// shift changes its position.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernel.h"
#include "memory/kv_group.h"
#include "shift/rotation.h"

namespace kvg {

class query_rotations {
public:
    // waiting: as settle() returns it
    query_rotations(const kv_group & group, const rotation_list & waiting);
    // The rotations for attention in a layer. The result points into this object.
    attend_rotations of(const layer_rotation & how);

private:
    uint32_t head_dim_; // padded
    rotation_tables tables_;
    std::vector<uint32_t> of_cell_; // empty when no cell waits
};

} // namespace kvg
