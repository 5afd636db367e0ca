#include "host_memory.h"

#include <sys/mman.h>

#include "device.h"
#include "error.h"

namespace kvg {

// ggml's structs of a few hundred bytes, by which malloc grows its heap in larger steps
static constexpr size_t SMALL_CHANGE = 2u << 20;

bool has_host_memory(size_t n_bytes) {
    size_t size = 0;
    if (__builtin_add_overflow(n_bytes, SMALL_CHANGE, &size)) {
        return false;
    }
    // not by malloc: what it frees changes its idea of which sizes are large
    void * there = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (there == MAP_FAILED) {
        return false;
    }
    munmap(there, size);
    return true;
}

void require_host_memory(size_t n_bytes, const char * what) {
    if (!has_host_memory(n_bytes)) {
        fail(KVG_DEVICE, "out of host memory: %s takes %s; raise the limit (ulimit -v), or use a smaller n_ctx or n_ubatch",
             what, format_bytes(n_bytes + SMALL_CHANGE).c_str());
    }
}

ggml_context_ptr new_ggml_context(size_t n_bytes, void * buffer) {
    require_host_memory(buffer ? 0 : n_bytes, "a table of tensors");
    return ggml_context_ptr(ggml_init({n_bytes, buffer, /*no_alloc*/ true}));
}

} // namespace kvg
