// What devices can do with weights of a type.
#pragma once

#include <ggml-cpp.h>

#include "model/gguf_file.h"

namespace kvg {

// Types that ggml multiplies as weights. Its own intermediate types (Q8_1, Q8_K) and integers are not among them.
bool is_weight_type(ggml_type type);
// A product with such a matrix, or with those of experts. buffer: where the matrix lies, nullptr: not said
bool can_multiply(ggml_backend_dev_t dev, const gguf_tensor & source, ggml_backend_buffer_t buffer);
// Whether rows can be read out of such a matrix.
bool can_get_rows(ggml_backend_dev_t dev, ggml_type type, int64_t ne0, int64_t ne1);

} // namespace kvg
