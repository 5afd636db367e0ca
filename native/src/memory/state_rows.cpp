#include "memory/state_rows.h"

#include <algorithm>
#include <cstring>

#include "device.h"
#include "error.h"
#include "host_memory.h"

namespace kvg {

state_tensors new_state_tensors(ggml_context * ctx, const state_spec & spec, uint32_t n_rows) {
    const auto rows_of = [&](uint64_t floats) {
        return floats == 0 ? nullptr
                           : ggml_new_tensor_2d(ctx, GGML_TYPE_F32, static_cast<int64_t>(floats), int64_t{n_rows} + 1);
    };
    return {rows_of(spec.conv_floats()), rows_of(spec.floats() - spec.conv_floats())};
}

state_rows::state_rows(const std::vector<layer_spec> & layers, const std::vector<ggml_backend_dev_t> & homes, uint32_t n_rows)
    : n_rows_(n_rows) {
    std::vector<ggml_backend_dev_t> devices;
    for (size_t il = 0; il < layers.size(); ++il) {
        const bool is_host = homes.empty() || is_cpu(homes[il]);
        places_.push_back({layers[il].state_floats(), host_floats_, {nullptr, nullptr}});
        floats_ += places_.back().floats;
        host_floats_ += is_host ? places_.back().floats : 0;
        if (layers[il].recurs() && !is_host && std::find(devices.begin(), devices.end(), homes[il]) == devices.end()) {
            devices.push_back(homes[il]);
        }
    }
    for (ggml_backend_dev_t device : devices) {
        parts_.push_back({device, ggml_backend_dev_buffer_type(device), {}, 0, nullptr, nullptr});
        create(parts_.back(), layers, homes);
    }
}

void state_rows::create(part & part, const std::vector<layer_spec> & layers, const std::vector<ggml_backend_dev_t> & homes) {
    part.ctx = new_ggml_context(2 * layers.size() * ggml_tensor_overhead());
    part.buffer.reset(ggml_backend_buft_alloc_buffer(part.type, 0));
    if (!part.buffer) {
        fail(KVG_DEVICE, "out of host memory for the tensors of recurrent states");
    }
    for (size_t il = 0; il < layers.size(); ++il) {
        if (!layers[il].recurs() || homes[il] != part.device) {
            continue;
        }
        const state_tensors made = new_state_tensors(part.ctx.get(), layers[il].state, n_rows_);
        for (ggml_tensor * t : {made.inputs, made.matrices}) {
            if (t) {
                ggml_format_name(t, t == made.inputs ? "state_inputs_%zu" : "state_matrices_%zu", il);
                part.tensors.push_back(t);
            }
        }
        places_[il].tensors = made;
    }
    part.bytes = ggml_backend_alloc_ctx_tensors_from_buft_size(part.ctx.get(), part.type);
    for (ggml_tensor * t : part.tensors) {
        t->buffer = part.buffer.get(); // says where it will be, and has no address
    }
}

uint64_t state_rows::bytes_on(ggml_backend_dev_t device) const {
    uint64_t bytes = is_cpu(device) ? host_floats_ * sizeof(float) * n_rows_ : 0;
    for (const part & part : parts_) {
        bytes += part.device == device ? part.bytes : 0;
    }
    return bytes;
}

void state_rows::allocate() {
    const auto refuse = [&](uint64_t bytes, ggml_backend_dev_t device) {
        fail(KVG_DEVICE, "%u recurrent states need %s on %s and %s are free; use a smaller n_seq_max or checkpoint_bytes",
             n_rows_, format_bytes(bytes).c_str(), ggml_backend_dev_name(device),
             format_bytes(device_memory(device).free).c_str());
    };
    if (host_floats_ > 0) {
        memory_.reset(
            static_cast<float *>(std::calloc(n_rows_, host_floats_ * sizeof(float)))); // no page is real before it is written
        if (!memory_) {
            refuse(bytes_on(cpu_device()), cpu_device());
        }
    }
    for (part & part : parts_) {
        for (ggml_tensor * t : part.tensors) {
            t->buffer = nullptr;
        }
        part.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(part.ctx.get(), part.type));
        if (!part.buffer) {
            refuse(part.bytes, part.device);
        }
        part.bytes = ggml_backend_buffer_get_size(part.buffer.get());
        ggml_backend_buffer_clear(part.buffer.get(), 0);
    }
}

void state_rows::read(uint32_t row, float * out) const {
    for (const place & each : places_) {
        if (each.floats > 0 && !each.tensors.inputs) {
            memcpy(out, on_host(row) + each.offset, each.floats * sizeof(float));
        }
        float * to = out;
        for (const ggml_tensor * t : {each.tensors.inputs, each.tensors.matrices}) {
            if (t) {
                ggml_backend_tensor_get(t, to, row * t->nb[1], t->nb[1]);
                to += t->ne[0];
            }
        }
        out += each.floats;
    }
}

void state_rows::write(uint32_t row, const float * data) {
    for (const place & each : places_) {
        if (each.floats > 0 && !each.tensors.inputs) {
            memcpy(on_host(row) + each.offset, data, each.floats * sizeof(float));
        }
        const float * from = data;
        for (ggml_tensor * t : {each.tensors.inputs, each.tensors.matrices}) {
            if (t) {
                ggml_backend_tensor_set(t, from, row * t->nb[1], t->nb[1]);
                from += t->ne[0];
            }
        }
        data += each.floats;
    }
}

void state_rows::clear(uint32_t n) {
    if (host_floats_ > 0) {
        std::fill_n(memory_.get(), n * host_floats_, 0.0f);
    }
    for (const part & part : parts_) {
        if (n > 0) {
            ggml_backend_buffer_clear(part.buffer.get(), 0); // not every device can clear a part of it
        }
    }
}

} // namespace kvg
