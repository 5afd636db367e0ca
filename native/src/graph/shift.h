// K-shift: rotates K in place by each cell's pending shift.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/kv_cache.h"
#include "graph/update_graph.h"
#include "model/hparams.h"

namespace kvg {

struct cell_span {
    uint32_t begin;
    uint32_t n;
};

// Runs of cells that wait for a rotation, their starts rounded down to `align`; above `max_runs` runs, the one span that covers
// them (a rotation by 0 is exact).
std::vector<cell_span> shift_spans(const cells & cells, uint32_t align, size_t max_runs);

// Whether the device can rotate K of this type in place.
bool can_shift_on(ggml_backend_dev_t device, const kv_cache & cache, const rope_params & rope);

// Rotates what waits and clears the cells' shifts. freq_factors: (n_rot / 2) or nullptr. Returns the number of cells that waited.
// error(KVG_DEVICE): nothing changed, or the cache is broken() when the device failed half way.
uint32_t run_shift(update_runner & runner, kv_cache & cache, const rope_params & rope, ggml_tensor * freq_factors);

// x rotated by positions, as the model's own K is; shared by decode and the K-shift, so that both rotate alike.
ggml_tensor * rope(ggml_context * ctx, ggml_tensor * x, ggml_tensor * positions, ggml_tensor * freq_factors,
                   const rope_params & params, bool in_place);

} // namespace kvg
