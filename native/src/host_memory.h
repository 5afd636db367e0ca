// ggml ends the process where malloc fails: so whether there is room is found out before.
#pragma once

#include <cstddef>

#include <ggml-cpp.h>

namespace kvg {

// Whether the host has n_bytes more for this process, and a little for what is small: under RLIMIT_AS (`ulimit -v`), or where the kernel
// doesn't overcommit. It is not kept for the caller: another thread may take it.
bool has_host_memory(size_t n_bytes);
// error(KVG_DEVICE), which says what it would have been for
void require_host_memory(size_t n_bytes, const char * what);

// Most that ggml's allocator and scheduler take to allocate a graph, per tensor of it: hash tables, where each tensor lies, splits.
constexpr size_t TABLES_PER_TENSOR = 2048;

// ggml_init, which would abort. buffer: of n_bytes; nullptr: ggml allocates. error(KVG_DEVICE)
ggml_context_ptr new_ggml_context(size_t n_bytes, void * buffer = nullptr);

} // namespace kvg
