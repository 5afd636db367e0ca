// Preloaded for tests on Mesa's software Vulkan, whose queue thread (22.3.6) reads small blocks that it has freed. They are kept for a
// while, so that nobody else's are there.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

enum { N_KEPT = 1 << 18, MAX_BYTES = 4096 };

static _Atomic(void *) kept[N_KEPT];
static atomic_uint n_freed;

void free(void * block) {
    static _Atomic(void (*)(void *)) next;
    if (!next) {
        next = (void (*)(void *)) dlsym(RTLD_NEXT, "free");
    }
    if (block && malloc_usable_size(block) <= MAX_BYTES) {
        block = atomic_exchange(&kept[atomic_fetch_add(&n_freed, 1) % N_KEPT], block);
    }
    if (block) {
        next(block);
    }
}
