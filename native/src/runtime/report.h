// What a context has on each device, and which of its work the CPU does there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "graph/decoder.h"
#include "memory/kv_cache.h"
#include "model/weights.h"
#include "runtime/upkeep.h"

namespace kvg {

struct context_part {
    ggml_backend_dev_t device;
    uint32_t n_layer;      // whose weights are there
    uint32_t n_cache;      // whose cells are there
    uint64_t weight_bytes; // what is mapped from the file included
    uint64_t cache_bytes;
    uint64_t compute_bytes;
    std::string attention; // "flash", "plain", "attend"; "" without cells
    bool shift_on_device;  // else the CPU rotates K for it; true without cells
    std::string fallbacks; // operations that its layers need and the CPU does: "ROPE, SOFT_MAX"
};

// One for each device that has anything, the CPU last; compute_bytes is 0.
std::vector<context_part> list_parts(const model & model, const kv_cache & cache, const decoder & decoder,
                                     const upkeep & upkeep);

} // namespace kvg
