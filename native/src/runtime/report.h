// What a context has on each device, and which work the CPU does for that device.
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
    uint32_t n_layer;      // layers whose weights are there
    uint32_t n_cache;      // layers whose cells are there
    uint64_t weight_bytes; // including weights that are mapped from the file
    uint64_t mapped_bytes; // of these, those that are mapped
    uint64_t cache_bytes;
    uint64_t compute_bytes;
    std::string attention; // "flash", "plain" or "attend"; "" without cells
    bool shift_on_device;  // whether the device rotates K itself; otherwise the CPU does. True without cells
    std::string fallbacks; // operations of its layers that the CPU does instead: "ROPE, SOFT_MAX"
    uint64_t pinned_bytes; // of cache_bytes, those in host memory that a device copies from and to directly
};

// One for each device that holds weights or cells; the CPU is last. compute_bytes is left 0.
std::vector<context_part> list_parts(const model & model, const kv_cache & cache, const decoder & decoder,
                                     const upkeep & upkeep);

} // namespace kvg
