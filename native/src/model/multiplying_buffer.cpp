#include "model/multiplying_buffer.h"

#include <cstring>
#include <vector>

#include <ggml-cpp.h>

#include "cpu/products.h"
#include "device.h"
#include "model/weight_types.h"

namespace kvg {

namespace {

// Buffers of this device that lay weights out anew, for faster kernels. "AMX" is left out: compiled by GCC 12, its kernels crash.
std::vector<ggml_backend_buffer_type_t> repacking_buffers(ggml_backend_dev_t dev) {
    std::vector<ggml_backend_buffer_type_t> found;
    void * address = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), "ggml_backend_dev_get_extra_bufts");
    const auto list = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(address);
    for (ggml_backend_buffer_type_t * type = list ? list(dev) : nullptr; type && *type; ++type) {
        if (strcmp(ggml_backend_buft_name(*type), "AMX") != 0) {
            found.push_back(*type);
        }
    }
    return found;
}

} // namespace

ggml_backend_buffer_type_t multiplying_buffer(ggml_backend_dev_t dev, const gguf_tensor & source) {
    if (is_cpu(dev) && product_kernel_for(source.type)) {
        return ggml_backend_dev_buffer_type(dev);
    }
    for (ggml_backend_buffer_type_t type : repacking_buffers(dev)) {
        // an answer depends on where a weight lies
        const ggml_backend_buffer_ptr empty(ggml_backend_buft_alloc_buffer(type, 0));
        if (empty && can_multiply(dev, source, empty.get())) {
            return type;
        }
    }
    return ggml_backend_dev_buffer_type(dev);
}

} // namespace kvg
