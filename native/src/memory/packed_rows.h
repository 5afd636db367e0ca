// Rows of some cells in a layer on their way to another cache: on a device they stay there.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ggml-cpp.h>

#include "memory/kv_group.h"

namespace kvg {

class packed_rows {
public:
    // place: of the layer in its group. Its rows are not there yet: one of the two below comes next. error(KVG_DEVICE)
    packed_rows(const kv_group & group, size_t place, uint32_t n_cells, bool on_device);

    // Whether K and V of a layer are in memory that isn't the host's.
    static bool is_on_device(const kv_group & group, size_t place);
    // On a device: copies these cells there. error(KVG_DEVICE)
    void gather(kv_group & group, const std::vector<uint32_t> & cells);
    // Else: K of each cell, then V of each.
    uint8_t * data() { return bytes_.get(); }

    uint32_t n_cells() const { return n_cells_; }
    uint64_t n_bytes() const { return n_cells_ * (k_row_bytes_ + v_row_bytes_); }
    // Whether they can be rows of this group.
    bool fits(const kv_group & group) const;
    // Row from[i] goes into cells[i] of a layer. Between two devices, and between a device and the host, by way of host memory.
    // precondition: fits(), and each of `from` is below n_cells(). error(KVG_DEVICE)
    void write(kv_group & group, size_t place, const std::vector<uint32_t> & from, const std::vector<uint32_t> & cells) const;

private:
    void scatter(kv_group & group, size_t place, const std::vector<uint32_t> & from, const std::vector<uint32_t> & cells) const;

    size_t place_; // at the source
    uint32_t n_cells_;
    cache_types types_;
    uint64_t k_row_bytes_;
    uint64_t v_row_bytes_;
    std::unique_ptr<uint8_t[]> bytes_; // in host memory; else the rest
    ggml_backend_dev_t device_ = nullptr;
    ggml_context_ptr ctx_;
    ggml_backend_buffer_ptr buffer_;
    std::vector<ggml_tensor *> words_; // K, and V unless that is a part of K: rows of F32 words
};

} // namespace kvg

struct kvg_packed {
    kvg::packed_rows rows;
};
