// Counts how often a process waits for a device of ggml, with LD_PRELOAD: build with `cc -shared -fPIC -o count_waits.so count_waits.c`.
#define _GNU_SOURCE
#include <dlfcn.h>

static long n;

long waits(void) { return n; }

static void (*real(const char * name))(void *) {
    void * base = dlopen("libggml-base.so.0", RTLD_NOLOAD | RTLD_LAZY);
    return (void (*)(void *)) dlsym(base, name);
}

void ggml_backend_synchronize(void * backend) {
    ++n;
    real("ggml_backend_synchronize")(backend);
}

void ggml_backend_event_synchronize(void * event) {
    ++n;
    real("ggml_backend_event_synchronize")(event);
}
