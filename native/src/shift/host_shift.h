// The K-shift of other devices' cells by the CPU: where a device can't rotate K of a type in F32, or too many kinds of
// dither wait.
#pragma once

#include "memory/kv_group.h"
#include "shift/cpu_rotation.h"

namespace kvg {

// Fetches the rows of a part that wait, a piece of a layer at a time, rotates them and puts them back. After a failure or an
// exception some of them may be rotated.
ggml_status shift_on_host(const kv_group & group, const kv_part & part, cpu_rotation & rotation);

} // namespace kvg
