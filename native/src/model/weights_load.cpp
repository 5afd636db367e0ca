// How weights get into the buffers of devices.
#include <map>

#include "device.h"
#include "error.h"
#include "host_memory.h"
#include "model/weights.h"
#include "parallel.h"

namespace kvg {

// The tensors, and what they take: those of a device that reads host memory point into the mapped file.
void model::create(group & g) {
    g.ctx = new_ggml_context(g.tensors.size() * ggml_tensor_overhead());
    g.mapped = is_cpu(g.device) && ggml_backend_buft_is_host(g.type);
    for (const placed & p : g.tensors) {
        *p.target = ggml_new_tensor_3d(g.ctx.get(), p.source->type, p.source->ne[0], p.source->ne[1], p.source->ne[2]);
        ggml_set_name(*p.target, p.source->name.c_str());
        g.mapped = g.mapped && p.source->offset % ggml_backend_buft_get_alignment(g.type) == 0;
        g.bytes += p.source->size;
    }
    if (!g.mapped) {
        g.bytes = ggml_backend_alloc_ctx_tensors_from_buft_size(g.ctx.get(), g.type);
    }
}

void model::require_room() const {
    std::map<ggml_backend_dev_t, uint64_t> needed;
    for (const group & g : groups_) {
        needed[g.device] += g.mapped ? 0 : g.bytes;
    }
    for (const auto & [device, bytes] : needed) {
        if (!has_room(device, bytes)) {
            fail(KVG_DEVICE, "%s needs %s for the weights and has %s free; use %s", ggml_backend_dev_name(device),
                 format_bytes(bytes).c_str(), format_bytes(device_memory(device).free).c_str(),
                 is_cpu(device) ? "a smaller model" : "fewer n_gpu_layers, another tensor_split or a smaller model");
        }
    }
}

void model::place(group & g) {
    if (how_ == loading::measure) {
        g.buffer.reset(ggml_backend_buft_alloc_buffer(g.type, 0));
        for (const placed & p : g.tensors) {
            (*p.target)->buffer = g.buffer.get(); // says where it would be, and has no address
        }
    } else if (g.mapped) {
        void * base = const_cast<uint8_t *>(g.window->data()); // mapped read-only; weights are never written
        g.buffer.reset(ggml_backend_dev_buffer_from_host_ptr(g.device, base, g.window->size(), g.window->size()));
        for (const placed & p : g.tensors) {
            auto * address = const_cast<uint8_t *>(g.window->at(p.source->offset));
            if (!g.buffer || ggml_backend_tensor_alloc(g.buffer.get(), *p.target, address) != GGML_STATUS_SUCCESS) {
                fail(KVG_DEVICE, "%s can't use the mapped file", ggml_backend_dev_name(g.device));
            }
        }
    } else {
        g.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(g.ctx.get(), g.type));
        if (!g.buffer) {
            fail(KVG_DEVICE, "%s refused %s for the weights, with %s free; use fewer n_gpu_layers or a smaller model",
                 ggml_backend_dev_name(g.device), format_bytes(g.bytes).c_str(),
                 format_bytes(device_memory(g.device).free).c_str());
        }
        g.bytes = ggml_backend_buffer_get_size(g.buffer.get());
        if (is_cpu(g.device)) {
            advise_huge_pages(ggml_backend_buffer_get_base(g.buffer.get()), ggml_backend_buffer_get_size(g.buffer.get()));
        }
        // the CPU repacks as it writes, which takes longer than reading
        parallel_for(g.tensors.size(), is_cpu(g.device) ? static_cast<size_t>(usable_cpus()) : 1, [&](size_t i) {
            const placed & p = g.tensors[i];
            ggml_backend_tensor_set(*p.target, g.window->at(p.source->offset), 0, p.source->size);
            g.window->release(p.source->offset, p.source->size);
        });
    }
    if (!g.buffer) {
        fail(KVG_DEVICE, "%s made no buffer", ggml_backend_dev_name(g.device));
    }
    ggml_backend_buffer_set_usage(g.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
}

} // namespace kvg
