// What the calls about files, models and plans share.
#pragma once

#include <memory>
#include <vector>

#include "kvgraph.h"
#include "model/hparams.h"
#include "model/weights.h"

namespace kvg {

// Of layers that differ, the most of any. `arch` lives as long as h.
void fill_info(kvg_model_info & out, const hparams & h, const tensor_totals & totals);

// error(KVG_INVALID_ARGUMENT) when there is no such layer
void fill_layer(kvg_layer_info & out, const hparams & h, int64_t layer);

// error(KVG_INVALID_ARGUMENT)
std::vector<key_override> overrides_of(const kvg_override * overrides, int64_t n);

// As the caller's params say.
std::shared_ptr<const model> load_model(const char * path, const kvg_model_params * params, loading how);

} // namespace kvg
