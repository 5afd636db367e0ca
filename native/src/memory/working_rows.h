// Rows of K and V on a device for layers whose cells are in host memory: room for a few layers, which they use in turn. A layer's rows
// have the numbers of its cells, so graphs see them as they see cells.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include <ggml-cpp.h>

#include "memory/kv_group.h"
#include "model/hparams.h"

namespace kvg {

// A layer's turn.
struct row_turn {
    ggml_backend_dev_t device; // nullptr: the layer has none; it reads cells where they lie, or doesn't attend
    bool is_owner;             // of K and V; false: it reads those of an earlier layer, which are still there
    uint32_t place;            // of those on the device
    ggml_tensor * k;           // (width, n_rows); nullptr unless is_owner
    ggml_tensor * v;
};

class working_rows {
public:
    // Nothing is allocated yet. n_places: layers that each device has room for, at least 1. There are fewer where fewer layers have rows
    // there, and more where later layers read those of so many earlier ones.
    working_rows(const hparams & h, const kv_homes & homes, const std::deque<kv_group> & groups, uint32_t n_places);
    // error(KVG_DEVICE)
    void allocate();

    const row_turn & of(uint32_t layer) const { return turns_[layer]; }
    // bytes there; the same before allocate()
    uint64_t bytes_on(ggml_backend_dev_t device) const;
    // each that has any
    std::vector<ggml_backend_dev_t> devices() const;

private:
    struct room {
        std::vector<uint32_t> readers; // layers, rising
        size_t place_bytes = 0;        // K and V of the largest layer
        ggml_context_ptr ctx;
        std::vector<ggml_backend_buffer_ptr> buffers; // one for each place
    };
    bool plan(const std::vector<layer_spec> & layers, const std::vector<uint32_t> & readers, size_t n_places);
    void create(const std::deque<kv_group> & groups, const std::vector<layer_spec> & layers, room & room);
    void allocate(ggml_backend_dev_t device, room & room);

    std::vector<row_turn> turns_; // of each layer
    std::map<ggml_backend_dev_t, room> rooms_;
};

} // namespace kvg
