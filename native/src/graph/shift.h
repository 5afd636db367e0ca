// K-shift: rotates K in place by each cell's pending shift.
#pragma once

#include <cstdint>

#include "cache/kv_cache.h"
#include "graph/update_graph.h"
#include "model/hparams.h"

namespace kvg {

// Whether the device can rotate K of this type.
bool can_shift_on(ggml_backend_dev_t device, const hparams & h, ggml_type type_k);

// Rotates what waits and clears the cells' shifts. freq_factors: (n_rot / 2) or nullptr. Returns the number of cells that waited.
// error(KVG_DEVICE): nothing changed, or the cache is broken() when the device failed half way.
uint32_t run_shift(update_runner & runner, kv_cache & cache, const rope_params & rope, ggml_tensor * freq_factors);

} // namespace kvg
