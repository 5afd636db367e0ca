#include "backends.h"

#include <algorithm>

#include "device.h"

namespace kvg {

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

void backends::set_threads(int n_threads) const {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu()));
    const auto set =
        reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
    if (set) {
        set(cpu(), n_threads);
    }
}

} // namespace kvg
