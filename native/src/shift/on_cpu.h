// The CPU rotates rows of K in host memory, of any cache type: it reads them as floats, rotates them and rounds them again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "cpu/kernel.h"
#include "memory/kv_group.h"
#include "shift/rotation.h"

namespace kvg {

class row_rotator {
public:
    // type: of the rows. are_mixed: false for the floats that kv_group::read() gives, whatever the cache's rows are. The other arguments
    // must outlive this object.
    row_rotator(const kv_group & group, const std::vector<layer_rotation> & layers, const rotation_list & list, ggml_type type,
                int n_threads, bool are_mixed = true);

    // Rotates all rows of the list. data: the rows of a layer, `stride` bytes apart
    void rotate(uint32_t layer, uint8_t * data, size_t stride) { rotate(layer, list_.rows, data, stride); }
    // The same as a graph node, for a layer whose cache is in host memory. The node must not outlive this object.
    ggml_tensor * node(ggml_context * ctx, uint32_t layer);
    // The same for a layer whose cache is on another device: fetches rows, a piece at a time, and writes them back. After a failure or
    // an exception some of the rows may be rotated.
    ggml_status rotate_fetched(uint32_t layer);

private:
    struct job {
        row_rotator * self;
        const layer_rotation * how;
        const float * table;
        const std::vector<rotated_row> * rows;
        uint8_t * data;
        size_t stride;
    };
    void rotate(uint32_t layer, const std::vector<rotated_row> & rows, uint8_t * data, size_t stride);
    void rotate_share(const job & job, size_t thread, size_t n_threads);
    static void compute(ggml_tensor * dst, const ggml_tensor *, int ith, int nth, void * job);

    const kv_group & group_;
    const std::vector<layer_rotation> & layers_;
    const rotation_list & list_;
    const row_kernel & kernel_;
    ggml_type type_;
    bool are_mixed_;
    uint32_t width_;
    size_t n_threads_;
    rotation_tables tables_;
    std::vector<float> scratch_; // a padded row for each thread
    std::deque<job> jobs_;       // one for each node
};

} // namespace kvg
