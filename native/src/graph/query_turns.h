// Attention on the CPU to K that waits for a K-shift: it stays as it is, and the query turns the other way.
//
// q . R(s)k = R(-s)q . k, so nothing is rounded again: a quantized K that a context shift moves stays what was written, to the bit.
#pragma once

#include <cstdint>
#include <vector>

#include "attend/kernel.h"
#include "graph/cpu_rotation.h"

namespace kvg {

// Cells that wait for the same shift may go on waiting if they are at least so many: for fewer, turning the queries costs too much.
constexpr uint32_t MIN_WAITING = 64;

class query_turns {
public:
    // how: as K is rotated. They must outlive it.
    query_turns(const kv_cache & cache, const rotation & how) : cache_(cache), how_(how) {}

    // For all cells of the cache that wait now. Good until the next call.
    attend_turns now();

private:
    const kv_cache & cache_;
    rotation how_;
    std::vector<uint32_t> of_cell_;
    std::vector<float> turns_;
};

} // namespace kvg
