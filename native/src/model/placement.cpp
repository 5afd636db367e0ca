#include "model/placement.h"

#include <algorithm>
#include <cmath>

#include "device.h"
#include "error.h"

namespace kvg {

// Where each device's share ends, of 1.
static std::vector<double> share_ends(const std::vector<ggml_backend_dev_t> & devices, const std::vector<float> & split) {
    if (split.size() > devices.size()) {
        fail(KVG_INVALID_ARGUMENT, "tensor_split has %zu shares for %zu devices", split.size(), devices.size());
    }
    std::vector<double> ends(devices.size(), 0.0);
    for (size_t i = 0; i < split.size(); ++i) {
        if (!(split[i] >= 0) || !std::isfinite(split[i])) {
            fail(KVG_INVALID_ARGUMENT, "tensor_split[%zu] is %g, expected a share of 0 or more", i,
                 static_cast<double>(split[i]));
        }
        ends[i] = static_cast<double>(split[i]);
    }
    if (std::all_of(ends.begin(), ends.end(), [](double share) { return share == 0.0; })) {
        for (size_t i = 0; i < devices.size(); ++i) {
            const memory there = device_memory(devices[i]);
            ends[i] =
                static_cast<double>(std::max<uint64_t>(1, there.total == 0 ? device_memory(cpu_device()).free : there.free));
        }
    }
    double sum = 0.0;
    for (double & end : ends) {
        sum += end;
        end = sum;
    }
    for (double & end : ends) {
        end /= sum;
    }
    return ends;
}

placement::placement(const placement_request & request, uint32_t n_layer) : layers_(n_layer + 1, cpu_device()) {
    const std::vector<ggml_backend_dev_t> devices = find_devices(request.devices);
    const std::vector<double> ends = share_ends(devices, request.split);
    const int64_t all = int64_t{n_layer} + 1;
    const int64_t n = request.n_gpu_layers < 0 ? all : std::min(request.n_gpu_layers, all);
    for (int64_t i = 0; i < n && !devices.empty(); ++i) {
        const double done = static_cast<double>(i) / static_cast<double>(n);
        const auto at = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), done) - ends.begin());
        layers_[static_cast<size_t>(all - n + i)] = devices[std::min(at, devices.size() - 1)];
    }
}

std::vector<ggml_backend_dev_t> placement::devices() const {
    std::vector<ggml_backend_dev_t> found;
    for (ggml_backend_dev_t dev : layers_) {
        if (!is_cpu(dev) && std::find(found.begin(), found.end(), dev) == found.end()) {
            found.push_back(dev);
        }
    }
    found.push_back(cpu_device());
    return found;
}

std::string placement::name() const {
    std::string names;
    for (ggml_backend_dev_t dev : devices()) {
        if (names.empty() || !is_cpu(dev)) {
            names += std::string(names.empty() ? "" : ",") + ggml_backend_dev_name(dev);
        }
    }
    return names;
}

} // namespace kvg
