// K-shift: rotates K by each cell's pending shift, on the device of the cells, where they lie if it can be.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "cache/kv_cache.h"
#include "graph/cpu_rotation.h"
#include "graph/originals.h"
#include "graph/update_graph.h"
#include "model/hparams.h"

namespace kvg {

// What the model's file says of frequencies, (n_rot / 2) on each device; empty when it says nothing.
using device_freqs = std::map<ggml_backend_dev_t, ggml_tensor *>;

class k_shift {
public:
    // Asks the devices; nothing needs to be allocated yet.
    k_shift(kv_cache & cache, const hparams & h, const device_freqs & factors);

    // Whether the device rotates its cells itself; else the CPU does it for it, as it does for all where more than 16 kinds of dither
    // wait. True without cells.
    bool is_on(ggml_backend_dev_t device) const;
    // The frame that suits the cells and what is about to be decoded.
    int32_t frame_for(const pos_bounds & decoded) const;
    // Keeps the originals of cells that this makes turn; in frame 0 nobody needs them. std::bad_alloc: nothing changed
    void set_frame(int32_t frame);
    // Rotates what waits, on all devices at the same time, then what the CPU does for them, and clears the cells' shifts. Returns the
    // number of cells that waited. error(KVG_DEVICE): nothing changed, or the cache is broken() when a device failed half way.
    uint32_t run(update_runner & runner, int n_threads);
    // K that was read of the cache, nothing of which waits, becomes K for the cells' positions, whatever the frame: a layer's as floats,
    // or what kv_cache::read_rows gave.
    void leave_frame(float * k) const;
    void leave_frame(const std::vector<uint32_t> & which, uint8_t * rows, int n_threads) const;

private:
    struct share {
        const kv_part * part;
        rotation how;
        bool on_device;
    };

    update_graph build(const share & s, cpu_rotation * by_cpu) const;
    std::vector<row_turn> turns_of_originals() const;
    void turn(update_runner & runner, const std::vector<row_turn> & of_originals, int n_threads);
    bool on_host(const share & s, cpu_rotation & rotation, const originals * kept);

    kv_cache & cache_;
    originals kept_;
    std::vector<share> shares_;
};

} // namespace kvg
