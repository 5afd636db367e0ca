#include "log.h"

#include <mutex>
#include <new>

#include <ggml.h>
#include <pthread.h>

namespace kvg {

namespace {

// Recursive: a callback may run a garbage collector that frees a context, which logs again in the same thread. Held during the
// call, so that after log_set(nullptr) none is running any more.
std::recursive_mutex sink_mutex;
kvg_log_callback sink = nullptr;
void * sink_data = nullptr;

void forward(ggml_log_level level, const char * text, void *) {
    const int32_t ours = level == GGML_LOG_LEVEL_ERROR  ? 4
                         : level == GGML_LOG_LEVEL_WARN ? 3
                         : level == GGML_LOG_LEVEL_INFO ? 2
                                                        : 1;
    const std::lock_guard<std::recursive_mutex> lock(sink_mutex);
    if (sink) {
        sink(ours, text, sink_data);
    }
}

} // namespace

void log_set(kvg_log_callback callback, void * user_data) {
    // another thread may have held it at a fork, waiting for Python
    static const int registered = pthread_atfork(nullptr, nullptr, [] { new (&sink_mutex) std::recursive_mutex; });
    (void) registered;
    {
        const std::lock_guard<std::recursive_mutex> lock(sink_mutex);
        sink = callback;
        sink_data = user_data;
    }
    ggml_log_set(forward, nullptr);
}

} // namespace kvg
