// K-shift: rotates K of shifted cells to their new positions. settle.h decides which cells; k_shift decides whether the CPU or a device
// rotates them.
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
    // layers: as rotations_of() returns them. Asks the devices what they support; the cache needs no memory yet. Both arguments must
    // outlive this object.
    k_shift(kv_group & group, const std::vector<layer_rotation> & layers);

    // Whether the device rotates K itself. If not, the CPU fetches the rows, rotates them and writes them back. The CPU also does this
    // for every device when the rows carry more than 16 different dithers. True for a device without cells.
    bool is_on(ggml_backend_dev_t device) const { return unable_.count(device) == 0; }
    // Rotates K of these cells in place: on all devices at the same time, and then the rows that the CPU fetches.
    // error(KVG_DEVICE): nothing changed, or a device failed half way and the cache is broken().
    void run(int n_threads, const rotation_list & list);
    // rows: copies of these cells' raw rows in some layers, as read_rows() gives them. Rotates the copies of cells whose K-shift is
    // pending. dither: set to the dither that each copy of K then carries
    void rotate_copies(const std::vector<uint32_t> & cells, const layer_range & range, uint8_t * rows, uint8_t * dither,
                       int n_threads) const;
    // k: a copy of a layer's K as floats, for all cells, as kv_group::read() gives it. Rotates it where a K-shift is pending.
    void rotate_floats(uint32_t layer, float * k) const;

private:
    void rotate(int n_threads, const rotation_list & list);
    void rotate_by_type(int n_threads, const rotation_list & list);

    kv_group & group_;
    const std::vector<layer_rotation> & layers_;
    std::set<ggml_backend_dev_t> unable_; // devices that cannot rotate K; the CPU does it for them
};

} // namespace kvg
