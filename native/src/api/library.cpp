// Versions, log, devices, faults.
#include <ggml.h>
#include <pthread.h>

#include "api/handles.h"
#include "device.h"
#include "fault.h"
#include "log.h"

using namespace kvg;

static thread_local std::string last_error;

kvg_status kvg::set_error(kvg_status status, const char * message) noexcept {
    try {
        last_error = message;
    } catch (...) {
        last_error.clear();
    }
    return status;
}

const char * kvg_last_error(void) { return last_error.c_str(); }

// Where the calling thread's stack ends; 0 when the system doesn't tell.
static uintptr_t lowest_of_stack() noexcept {
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0) {
        return 0;
    }
    void * lowest = nullptr;
    size_t size = 0;
    const bool known = pthread_attr_getstack(&attributes, &lowest, &size) == 0;
    pthread_attr_destroy(&attributes);
    return known ? reinterpret_cast<uintptr_t>(lowest) : 0;
}

uint64_t kvg_stack_left(void) {
    thread_local const uintptr_t lowest = lowest_of_stack();
    const char here = 0;
    const auto address = reinterpret_cast<uintptr_t>(&here);
    return lowest != 0 && address > lowest ? address - lowest : 0;
}

const char * kvg_version(void) { return KVG_VERSION; }
const char * kvg_ggml_version_built(void) { return KVG_GGML_VERSION_BUILT; }
const char * kvg_ggml_version_running(void) { return ggml_version(); }

void kvg_log_set(kvg_log_callback callback, void * user_data) { log_set(callback, user_data); }

int32_t kvg_device_count(void) { return device_count(); }

kvg_status kvg_device_get(int32_t index, kvg_device_info * out) {
    return guarded([&] { device_info(index, need_struct(out, "out")); });
}

kvg_status kvg_rpc_add_server(const char * endpoint) {
    return guarded([&] { add_rpc_server(&need(endpoint, "endpoint")); });
}

kvg_status kvg_test_fault(const char * site, int64_t countdown) {
    return guarded([&] {
#ifdef KVGRAPH_TEST_HOOKS
        fault_arm(&need(site, "site"), countdown);
#else
        need(site, "site");
        fail(KVG_UNSUPPORTED, "fault %lld: this library was built without KVGRAPH_TEST_HOOKS",
             static_cast<long long>(countdown));
#endif
    });
}
