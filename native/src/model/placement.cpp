#include "model/placement.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "device.h"
#include "error.h"

namespace kvg {

static std::vector<double> device_shares(const std::vector<ggml_backend_dev_t> & devices, const std::vector<float> & split) {
    if (split.size() > devices.size()) {
        fail(KVG_INVALID_ARGUMENT, "tensor_split has %zu shares for %zu devices", split.size(), devices.size());
    }
    std::vector<double> shares(devices.size(), 0.0);
    for (size_t i = 0; i < split.size(); ++i) {
        if (!(split[i] >= 0) || !std::isfinite(split[i])) {
            fail(KVG_INVALID_ARGUMENT, "tensor_split[%zu] is %g, expected a share of 0 or more", i,
                 static_cast<double>(split[i]));
        }
        shares[i] = static_cast<double>(split[i]);
    }
    if (std::all_of(shares.begin(), shares.end(), [](double share) { return share == 0.0; })) {
        for (size_t i = 0; i < devices.size(); ++i) {
            const memory there = device_memory(devices[i]);
            shares[i] =
                static_cast<double>(std::max<uint64_t>(1, there.total == 0 ? device_memory(cpu_device()).free : there.free));
        }
    }
    return shares;
}

std::vector<size_t> share_layers(uint32_t n_layer, int64_t n_gpu_layers, const std::vector<double> & shares) {
    std::vector<double> ends = shares;
    std::partial_sum(ends.begin(), ends.end(), ends.begin());
    const size_t all = size_t{n_layer} + 1;
    const size_t n = n_gpu_layers < 0 ? all : static_cast<size_t>(std::min<int64_t>(n_gpu_layers, static_cast<int64_t>(all)));
    std::vector<size_t> homes(all, shares.size());
    for (size_t i = 0; i < n && !ends.empty(); ++i) {
        const double done = static_cast<double>(i) / static_cast<double>(n) * ends.back();
        const auto at = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), done) - ends.begin());
        homes[all - n + i] = std::min(at, ends.size() - 1);
    }
    return homes;
}

placement::placement(const placement_request & request, uint32_t n_layer, const layer_span & here) {
    std::vector<ggml_backend_dev_t> devices = find_devices(request.devices);
    const std::vector<double> shares = device_shares(devices, request.split);
    devices.push_back(cpu_device());
    const uint32_t n = here.n() + (here.end == n_layer ? 1 : 0); // with the output
    const std::vector<size_t> homes = share_layers(n - 1, request.n_gpu_layers, shares);
    for (uint32_t il = 0; il <= n_layer; ++il) {
        layers_.push_back(devices[homes[std::min(std::max(il, here.begin) - here.begin, n - 1)]]);
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
