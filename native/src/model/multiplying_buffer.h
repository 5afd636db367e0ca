// Which kind of buffer serves a matrix best.
#pragma once

#include <ggml-backend.h>

#include "model/gguf_file.h"

namespace kvg {

// The buffer in which the device multiplies this matrix fastest. Our own kernels read it as the file has it.
ggml_backend_buffer_type_t multiplying_buffer(ggml_backend_dev_t dev, const gguf_tensor & source);

} // namespace kvg
