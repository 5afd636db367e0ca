#include "runtime/report.h"

namespace kvg {

std::vector<context_part> list_parts(const model & model, const kv_cache & cache, const decoder & decoder,
                                     const upkeep & upkeep) {
    const placement & placement = model.placement();
    std::vector<context_part> parts;
    for (ggml_backend_dev_t device : placement.devices()) {
        context_part part = {};
        part.device = device;
        for (uint32_t il = model.hparams().here.begin; il < model.hparams().here.end; ++il) {
            part.n_layer += placement.layer(il) == device;
        }
        part.n_cache = cache.layers_on(device);
        part.weight_bytes = model.bytes_on(device);
        part.mapped_bytes = model.mapped_bytes_on(device);
        part.cache_bytes = cache.bytes_on(device);
        part.pinned_bytes = cache.pinned_bytes_on(device);
        part.attention = decoder.attention_on(device);
        part.shift_on_device = upkeep.can_shift_on(device);
        part.fallbacks = decoder.refused_by(device);
        parts.push_back(part);
    }
    return parts;
}

} // namespace kvg
