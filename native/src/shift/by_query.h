// Cells that wait: attention on the CPU meets their K as it is, and turns the query the other way.
//
// q . R(s)k = R(-s)q . k, so nothing is rounded again: a quantized K that a context shift moves stays what was written, to the bit.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernel.h"
#include "memory/kv_group.h"
#include "shift/rotation.h"

namespace kvg {

class query_turns {
public:
    // waiting: as settle() tells it
    query_turns(const kv_group & group, const turn_list & waiting);
    // What attention takes in a layer. It points into this.
    attend_turns of(const rotation & how);

private:
    uint32_t head_dim_; // padded
    turn_tables tables_;
    std::vector<uint32_t> of_cell_; // empty when no cell waits
};

} // namespace kvg
