// Rows of recurrent states: where their numbers are. Of a layer that a device updates they lie on that device, of others in host memory.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include <ggml-cpp.h>

#include "model/layer_spec.h"

namespace kvg {

// A layer's part of all rows on a device. The row behind the last is zeros: what a sequence begins with.
struct state_tensors {
    ggml_tensor *
        inputs; // F32 (conv_floats, n_rows + 1): the last inputs of the convolution; nullptr: the layer is in host memory
    ggml_tensor * matrices; // F32 (v_width * head_dim_k, n_rows + 1); nullptr: there is only the convolution
};

// Tensors of that shape for a layer, in a context with room for both.
state_tensors new_state_tensors(ggml_context * ctx, const state_spec & spec, uint32_t n_rows);

class state_rows {
public:
    // layers: of the model, those without a state have no part; homes: of each layer its state's device, empty: all are in host memory.
    // Nothing is allocated yet, and tensors already know their device, so devices can be asked what they support with them.
    state_rows(const std::vector<layer_spec> & layers, const std::vector<ggml_backend_dev_t> & homes, uint32_t n_rows);
    // All are zeros. Call it once. error(KVG_DEVICE)
    void allocate();

    uint32_t n_rows() const { return n_rows_; }
    // of a row, all layers together
    uint64_t floats() const { return floats_; }
    // bytes there; the same before allocate()
    uint64_t bytes_on(ggml_backend_dev_t device) const;
    bool any_on_device() const { return !parts_.empty(); }
    // layer: its number in the model, of one that has a state; so below
    bool is_on_host(uint32_t layer) const { return !places_[layer].tensors.inputs; }
    const state_tensors & on_device(uint32_t layer) const { return places_[layer].tensors; }
    // the layers in host memory, one after the other
    float * on_host(uint32_t row) const { return memory_.get() + row * host_floats_; }
    // floats of such a row before the layer's own
    uint64_t host_offset(uint32_t layer) const { return places_[layer].offset; }

    // A row of all layers, in their order: floats() of them.
    void read(uint32_t row, float * out) const;
    void write(uint32_t row, const float * data);
    // The first n rows, the only ones that were written, are zeros again.
    void clear(uint32_t n);

private:
    struct place {
        uint64_t floats; // 0: the layer has no state
        uint64_t offset;
        state_tensors tensors;
    };
    struct part {
        ggml_backend_dev_t device;
        ggml_backend_buffer_type_t type;
        std::vector<ggml_tensor *> tensors;
        uint64_t bytes;
        ggml_context_ptr ctx;
        ggml_backend_buffer_ptr buffer;
    };
    struct release_memory {
        void operator()(float * memory) const { std::free(memory); }
    };
    void create(part & part, const std::vector<layer_spec> & layers, const std::vector<ggml_backend_dev_t> & homes);

    uint32_t n_rows_;
    uint64_t floats_ = 0;
    uint64_t host_floats_ = 0;
    std::vector<place> places_; // of each layer
    std::vector<part> parts_;
    std::unique_ptr<float[], release_memory> memory_;
};

} // namespace kvg
