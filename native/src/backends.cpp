#include "backends.h"

#include <algorithm>
#include <atomic>

#include <pthread.h>

#include "device.h"
#include "error.h"

namespace kvg {

namespace {

std::atomic<bool> ran_on_threads{false};
std::atomic<bool> threads_left_behind{false}; // by a fork: OpenMP would wait for them for ever

} // namespace

static void require_threads() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { threads_left_behind = ran_on_threads.load(); });
    (void) registered;
    if (threads_left_behind) {
        fail(KVG_UNSUPPORTED, "this process was forked from one that computed on several threads, and they are not here: use "
                              "n_threads=1, or start processes with multiprocessing.get_context(\"spawn\")");
    }
    ran_on_threads = true;
}

backends::backends(const std::vector<ggml_backend_dev_t> & devices) {
    for (ggml_backend_dev_t device : devices) {
        owned_.push_back(open_backend(device));
        handles_.push_back(owned_.back().get());
    }
}

ggml_backend_t backends::of(ggml_backend_dev_t device) const {
    return *std::find_if(handles_.begin(), handles_.end(),
                         [&](ggml_backend_t backend) { return ggml_backend_get_device(backend) == device; });
}

bool backends::wait() const {
    return computed([&] {
        for (ggml_backend_t backend : handles_) {
            ggml_backend_synchronize(backend);
        }
        return GGML_STATUS_SUCCESS;
    });
}

void backends::set_threads(int n_threads) const {
    if (n_threads > 1) {
        require_threads();
    }
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu()));
    const auto set =
        reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
    if (set) {
        set(cpu(), n_threads);
    }
}

} // namespace kvg
