// K-shift: rotates K by each cell's pending shift, on the device of the cells, where they lie if it can be.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "memory/kv_group.h"
#include "memory/row_io.h"
#include "memory/update_graph.h"
#include "model/layer_spec.h"
#include "shift/cpu_rotation.h"

namespace kvg {

// What the model's file says of frequencies, (n_rot / 2) on each device; empty when it says nothing.
using device_factors = std::map<ggml_backend_dev_t, ggml_tensor *>;

class k_shift {
public:
    // Asks the devices; nothing needs to be allocated yet.
    k_shift(kv_group & group, const std::vector<layer_spec> & layers, const device_factors & factors);

    // Whether the device rotates its cells itself; else the CPU does it for it, as it does for all where more than 16 kinds of dither
    // wait. True without cells.
    bool is_on(ggml_backend_dev_t device) const;
    // Rotates these cells, on all devices at the same time, then what the CPU does for them, and clears their shifts. Returns how many.
    // error(KVG_DEVICE): nothing changed, or the cache is broken() when a device failed half way.
    // precondition: they are all that wait, or all cells are the CPU's
    uint32_t run(int n_threads, const std::vector<uint32_t> & rotated);
    // Rotates copies of those of these cells that wait: raw rows of some layers, as read_rows gives them. dither: what each of the cells' K
    // carries there
    void run_on_copy(const std::vector<uint32_t> & cells, const layer_range & range, uint8_t * rows, uint8_t * dither,
                     int n_threads) const;
    // And of all cells as floats, as kv_group::read gives them.
    void run_on_floats(float * k) const;

private:
    struct share {
        const kv_part * part;
        rotation how;
        bool on_device;
    };

    update_graph build(const share & s, cpu_rotation * by_cpu) const;

    kv_group & group_;
    std::vector<share> shares_;
};

} // namespace kvg
