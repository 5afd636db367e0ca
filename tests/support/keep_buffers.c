// Preloaded for the tests on software Vulkan: vkDestroyBuffer does nothing. A buffer's memory is freed all the same.
//
// Mesa 22.3 (Debian 12's) binds every buffer that a descriptor set names. ggml's sets all have room for as many buffers as any of
// its shaders takes, and a shader that takes fewer leaves the others as they were: those of an earlier dispatch, maybe destroyed since.
// Vulkan allows that, since no shader reads them. Mesa counts references in what it has freed, and now and then the process crashes.
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef void (*function)(void);
typedef function (*lookup)(void * instance, const char * name);

static void keep_buffer(void * device, uint64_t buffer, const void * allocator) {
    (void) device;
    (void) buffer;
    (void) allocator;
}

// The only way by which ggml finds it. The loader isn't among this library's dependencies: most processes don't need it.
function vkGetInstanceProcAddr(void * instance, const char * name) {
    static lookup loader = NULL;
    if (!loader) {
        loader = (lookup) dlsym(dlopen("libvulkan.so.1", RTLD_NOW), "vkGetInstanceProcAddr");
    }
    return strcmp(name, "vkDestroyBuffer") == 0 ? (function) keep_buffer : loader(instance, name);
}
