#include "memory/kv_cache.h"

#include <algorithm>
#include <map>

#include "device.h"
#include "error.h"

namespace kvg {

// Rows for n_cells, padded.
static uint32_t padded(uint32_t n_cells) { return (n_cells + MAX_SPAN_ALIGN - 1) / MAX_SPAN_ALIGN * MAX_SPAN_ALIGN; }

// Refuses a cache that the devices or the host can't hold: a kernel that overcommits would kill the process later, when the memory is
// touched.
static void require_room(const hparams & h, const std::vector<ggml_backend_dev_t> & devices, uint32_t n_cells,
                         uint32_t n_seq_max, const cache_types & types) {
    std::map<ggml_backend_dev_t, uint64_t> needed;
    needed[cpu_device()] = n_cells * h.groups.size() * cells::bytes_per_cell(n_seq_max);
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        const uint64_t row = ggml_row_size(types.k, h.layers[il].k_width()) + ggml_row_size(types.v, h.layers[il].v_width());
        uint64_t & bytes = needed[devices[il]];
        if (__builtin_add_overflow(bytes, row * padded(n_cells), &bytes)) {
            bytes = UINT64_MAX;
        }
    }
    for (const auto & [device, bytes] : needed) {
        if (!has_room(device, bytes)) {
            fail(KVG_DEVICE,
                 "a cache of %u cells needs %s on %s and %s are free; use a smaller n_ctx or smaller types of K and V", n_cells,
                 format_bytes(bytes).c_str(), ggml_backend_dev_name(device), format_bytes(device_memory(device).free).c_str());
        }
    }
}

kv_cache::kv_cache(const hparams & h, const std::vector<ggml_backend_dev_t> & devices, const backends & backends,
                   uint32_t n_cells, uint32_t n_seq_max, const cache_types & types, bool is_measured)
    : devices_(devices) {
    for (const layer_spec & layer : h.layers) {
        group_of_layer_.push_back(layer.group);
    }
    if (!is_measured) {
        require_room(h, devices, n_cells, n_seq_max, types);
    }
    for (const group_spec & spec : h.groups) {
        groups_.emplace_back(spec, devices, backends, is_measured ? 1 : n_cells, padded(n_cells), n_seq_max, types);
    }
}

void kv_cache::allocate() {
    for (kv_group & group : groups_) {
        group.allocate();
    }
}

uint32_t kv_cache::n_free() const {
    uint32_t n = UINT32_MAX;
    for (const kv_group & group : groups_) {
        n = std::min(n, group.cells().size() - group.cells().n_used());
    }
    return n;
}

uint32_t kv_cache::max_rows() const {
    uint32_t n = 0;
    for (const kv_group & group : groups_) {
        n = std::max(n, group.n_rows());
    }
    return n;
}

uint64_t kv_cache::bytes() const {
    uint64_t bytes = 0;
    for (const kv_group & group : groups_) {
        bytes += group.cell_bytes() * group.n_rows();
    }
    return bytes;
}

uint64_t kv_cache::bytes_on(ggml_backend_dev_t device) const {
    uint64_t bytes = 0;
    for (const kv_group & group : groups_) {
        bytes += group.bytes_on(device);
    }
    return bytes;
}

uint32_t kv_cache::layers_on(ggml_backend_dev_t device) const {
    return static_cast<uint32_t>(std::count(devices_.begin(), devices_.end(), device));
}

uint64_t kv_cache::cell_bytes() const {
    uint64_t bytes = 0;
    for (const kv_group & group : groups_) {
        bytes += group.cell_bytes();
    }
    return bytes;
}

int64_t kv_cache::n_graphs() const {
    int64_t n = 0;
    for (const kv_group & group : groups_) {
        n += group.n_graphs();
    }
    return n;
}

// The arguments are the same for every group, so the first group refuses what any would.
void kv_cache::seq_rm(int64_t seq, int64_t p0, int64_t p1) {
    for (kv_group & group : groups_) {
        group.cells().seq_rm(seq, p0, p1);
    }
}

void kv_cache::seq_cp(int64_t src, int64_t dst, int64_t p0, int64_t p1) {
    for (kv_group & group : groups_) {
        group.cells().seq_cp(src, dst, p0, p1);
    }
}

void kv_cache::seq_keep(int64_t seq) {
    for (kv_group & group : groups_) {
        group.cells().seq_keep(seq);
    }
}

int32_t kv_cache::seq_pos_min(int64_t seq) const {
    int32_t greatest = -1;
    for (const kv_group & group : groups_) {
        greatest = std::max(greatest, group.cells().seq_pos_min(seq));
    }
    return greatest;
}

int32_t kv_cache::seq_pos_max(int64_t seq) const {
    int32_t lowest = groups_.front().cells().seq_pos_max(seq);
    for (const kv_group & group : groups_) {
        lowest = std::min(lowest, group.cells().seq_pos_max(seq));
    }
    return lowest;
}

uint32_t kv_cache::seq_n_cells(int64_t seq) const {
    uint32_t n = 0;
    for (const kv_group & group : groups_) {
        n = std::max(n, group.cells().extent(seq).n);
    }
    return n;
}

// The group that has the most.
seq_count kv_cache::count(int64_t seq, int64_t p0, int64_t p1) const {
    seq_count most = {0, 0};
    for (const kv_group & group : groups_) {
        const seq_count here = group.cells().count(seq, p0, p1);
        most = {std::max(most.n, here.n), std::max(most.n_shared, here.n_shared)};
    }
    return most;
}

hold_range kv_cache::hold(int64_t seq, int64_t p0, int64_t p1) {
    const int64_t id = next_hold_++;
    hold_range range = {};
    for (size_t g = 0; g < groups_.size(); ++g) {
        try {
            range = groups_[g].cells().hold(id, seq, p0, p1);
        } catch (...) { // what one group refuses, or has no memory for, none has
            for (size_t held = 0; held < g; ++held) {
                groups_[held].cells().release(id);
            }
            throw;
        }
    }
    return range;
}

void kv_cache::attach(int64_t hold, int64_t seq) {
    for (kv_group & group : groups_) {
        group.cells().attach(hold, seq);
    }
}

void kv_cache::release(int64_t hold) {
    for (kv_group & group : groups_) {
        group.cells().release(hold);
    }
}

void kv_cache::clear(bool data) {
    for (kv_group & group : groups_) {
        group.clear(data);
    }
}

bool kv_cache::broken() const {
    return std::any_of(groups_.begin(), groups_.end(), [](const kv_group & group) { return group.broken(); });
}

} // namespace kvg
