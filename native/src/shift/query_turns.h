// Attention on the CPU to K that waits for a K-shift: it stays as it is, and the query turns the other way.
//
// q . R(s)k = R(-s)q . k, so nothing is rounded again: a quantized K that a context shift moves stays what was written, to the bit.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernel.h"
#include "shift/cpu_rotation.h"

namespace kvg {

class query_turns {
public:
    // how: as K is rotated. They must outlive it.
    query_turns(const kv_group & group, const rotation & how) : group_(group), how_(how) {}

    // For all cells of the cache that wait now. Good until the next call.
    attend_turns list();

private:
    void renew();

    const kv_group & group_;
    rotation how_;
    uint64_t version_ = 0; // of the cells' shifts, when there were turns for them
    std::vector<uint32_t> of_cell_;
    std::vector<float> turns_;
};

} // namespace kvg
