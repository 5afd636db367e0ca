// A row of a tensor whose numbers are in memory of the host.
#pragma once

#include <cstddef>

#include <ggml.h>

namespace kvg {

// matrix: of a tensor with three dimensions
template <class T> T * row_of(const ggml_tensor * t, size_t row, size_t matrix = 0) {
    return reinterpret_cast<T *>(static_cast<char *>(t->data) + matrix * t->nb[2] + row * t->nb[1]);
}

} // namespace kvg
