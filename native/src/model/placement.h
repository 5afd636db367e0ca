// Which device each layer goes to, decided once: its weights, and unless the context keeps them in host memory its cells.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ggml-backend.h>

#include "model/layer_spec.h"

namespace kvg {

// What is asked for, as llama.cpp's -dev, -ngl and -ts say it.
struct placement_request {
    std::string devices;       // as find_devices() takes it
    int64_t n_gpu_layers = -1; // the last n, the output being one more layer; negative: all
    std::vector<float> split;  // shares of the devices, in order, missing ones being 0; all 0: as much as each has free
};

// Which device each of n_layer layers and then the output goes to, by its number; shares.size() is the CPU. The last n_gpu_layers are
// shared out, those of the first device first (negative: all). shares: at least 0, their sum above 0
std::vector<size_t> share_layers(uint32_t n_layer, int64_t n_gpu_layers, const std::vector<double> & shares);

class placement {
public:
    // here: of the n_layer layers; the output is on a device of its own choice where the last of them is here.
    // error(KVG_DEVICE) for a device that is absent, error(KVG_INVALID_ARGUMENT) for shares that are none
    placement(const placement_request & request, uint32_t n_layer, const layer_span & here);

    // il: n_layer for the output. What is not here has the device of the layer nearest to it.
    ggml_backend_dev_t layer(uint32_t il) const { return layers_[il]; }
    ggml_backend_dev_t output() const { return layers_.back(); }
    uint32_t n_layer() const { return static_cast<uint32_t>(layers_.size()) - 1; }
    // Each that has a layer or the output, once, in the order of layers; then the CPU, which reads the inputs of every graph.
    std::vector<ggml_backend_dev_t> devices() const;
    // "CUDA0,CUDA1": devices() without the CPU, or its name when there is no other
    std::string name() const;

private:
    std::vector<ggml_backend_dev_t> layers_; // n_layer, then the output
};

} // namespace kvg
