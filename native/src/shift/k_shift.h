// K-shift: turns K of cells that were shifted to their positions. settle.h decides which; here is who does it.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "memory/kv_group.h"
#include "memory/row_io.h"
#include "memory/update_graph.h"
#include "shift/rotation.h"
#include "shift/settle.h"

namespace kvg {

class k_shift {
public:
    // layers: as of rotations_of(). Asks the devices; nothing needs to be allocated yet. The others must outlive it.
    k_shift(kv_group & group, const std::vector<rotation> & layers);

    // Whether the device rotates K itself; else the CPU fetches the rows, as it does from all devices where they carry more than 16
    // dithers. True without cells.
    bool is_on(ggml_backend_dev_t device) const { return unable_.count(device) == 0; }
    // Rotates K of these cells where it lies, on all devices at the same time, then what the CPU fetches.
    // error(KVG_DEVICE): nothing changed, or the cache is broken() when a device failed half way.
    void run(int n_threads, const turn_list & list);
    // Rotates copies of those of these cells whose K-shift is pending: raw rows of some layers, as read_rows gives them. dither: what
    // each of the cells' K carries there
    void rotate_copies(const std::vector<uint32_t> & cells, const layer_range & range, uint8_t * rows, uint8_t * dither,
                       int n_threads) const;
    // The same for all cells of a layer as floats, as kv_group::read gives them.
    void rotate_floats(uint32_t layer, float * k) const;

private:
    void rotate(int n_threads, const turn_list & list);

    kv_group & group_;
    const std::vector<rotation> & layers_;
    std::set<ggml_backend_dev_t> unable_; // devices for which the CPU rotates K
};

} // namespace kvg
