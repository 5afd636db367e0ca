// The backends of a context, one for each device.
#pragma once

#include <vector>

#include <ggml-cpp.h>

namespace kvg {

class backends {
public:
    // devices: each once, the CPU last. error(KVG_DEVICE) when one can't be opened
    explicit backends(const std::vector<ggml_backend_dev_t> & devices);

    // in the order of devices, so that the CPU's is last, as ggml's scheduler wants it
    const std::vector<ggml_backend_t> & all() const { return handles_; }
    // device: one of them
    ggml_backend_t of(ggml_backend_dev_t device) const;
    ggml_backend_t cpu() const { return handles_.back(); }
    // Until each has done what it was given. False when one failed.
    bool wait() const;
    // Of the CPU. error(KVG_UNSUPPORTED) for more than one in a child of a fork whose parent used several.
    void set_threads(int n_threads) const;

private:
    std::vector<ggml_backend_ptr> owned_;
    std::vector<ggml_backend_t> handles_;
};

} // namespace kvg
