// The K-shift as a graph of ggml's operations, for devices that rotate their cells themselves.
#pragma once

#include "memory/kv_group.h"
#include "memory/update_graph.h"
#include "shift/cpu_rotation.h"

namespace kvg {

// Whether the device of a part has all operations of such a graph, and none that is known to be done in less than F32. Asks with the
// cache's tensors, which say where they are, or will be.
bool can_shift(const kv_group & group, const kv_part & part, const rotation & how);
// Rotates a part's cells that wait: runs of them in place where rope takes the type so, else as rows that are floats on the way.
// error(KVG_DEVICE)
update_graph shift_graph(const kv_group & group, const kv_part & part, const rotation & how);

} // namespace kvg
