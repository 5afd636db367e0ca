// Where ggml's log lines go.
#pragma once

#include "kvgraph.h"

namespace kvg {

void log_set(kvg_log_callback callback, void * user_data);

} // namespace kvg
