// The types that K and V can be kept in.
#pragma once

#include <cstdint>

#include <ggml.h>

namespace kvg {

// The ggml type of a kvg_type. error(KVG_INVALID_ARGUMENT) when there is no such type
ggml_type cache_type(const char * name, int32_t type);
// error(KVG_UNSUPPORTED) when a type's blocks don't fit heads of head_dim: a head is read, rotated and moved on its own.
void require_blocks_fit(const char * name, ggml_type type, uint32_t head_dim);

// Whether every backend reads and writes rows of it.
constexpr bool is_common(ggml_type type) { return type == GGML_TYPE_F32 || type == GGML_TYPE_F16; }

} // namespace kvg
