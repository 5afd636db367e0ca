// K-shift: rotates K in place by each cell's pending shift.
#pragma once

#include <cstdint>
#include <map>

#include "cache/kv_cache.h"
#include "graph/update_graph.h"
#include "model/hparams.h"

namespace kvg {

// Whether the device can rotate K of this type.
bool can_shift_on(ggml_backend_dev_t device, const hparams & h, ggml_type type_k);

// What the model's file says of frequencies, (n_rot / 2) on each device; empty when it says nothing.
using device_freqs = std::map<ggml_backend_dev_t, ggml_tensor *>;

// Rotates what waits, on all devices at the same time, and clears the cells' shifts. Returns the number of cells that waited.
// error(KVG_DEVICE): nothing changed, or the cache is broken() when a device failed half way.
uint32_t run_shift(update_runner & runner, kv_cache & cache, const rope_params & rope, const device_freqs & factors);

} // namespace kvg
