// A part of a model, for a process of several that have its layers one after the other.
#pragma once

#include <cstdint>
#include <string>

#include "model/hparams.h"

namespace kvg {

// As a caller asks for it: layers [begin, end); both 0: all.
struct stage_request {
    int64_t begin = 0;
    int64_t end = 0;
};

// What read_hparams() says, with the stage's layers here. The others stay known, and are `elsewhere`; groups of cells keep their numbers.
// draft_heads: whether they are wanted; a stage can't have any.
// error(KVG_INVALID_ARGUMENT) for what is no range of the model's layers, error(KVG_UNSUPPORTED) for a model that can't be cut there
hparams read_stage(const gguf_file & file, const stage_request & stage, bool draft_heads);

} // namespace kvg
