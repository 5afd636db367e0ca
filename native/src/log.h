// One place for log lines, ggml's and ours.
#pragma once

#include "kvgraph.h"

namespace kvg {

void log_set(kvg_log_callback callback, void * user_data);

} // namespace kvg
