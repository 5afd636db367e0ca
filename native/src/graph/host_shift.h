// The K-shift through host memory: where a device can't rotate K of a type, or too many kinds of dither wait, or K is rotated from kept
// originals.
#pragma once

#include "cache/kv_cache.h"
#include "graph/cpu_rotation.h"
#include "graph/originals.h"

namespace kvg {

// Fetches a part's rows, a piece of a layer at a time, from the cache or from the originals that their cells refer to, rotates them and
// puts them into the cache. After a failure or an exception some of them may be rotated.
ggml_status shift_on_host(const kv_cache & cache, const kv_part & part, cpu_rotation & rotation, const originals * kept);

} // namespace kvg
