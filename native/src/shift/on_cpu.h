// Rows of K in host memory, rotated by the CPU in any cache type: read as floats, turned, rounded again.
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
    // type: of the rows: the cache's own, or F32 for what kv_group::read gives, which no matrix has mixed. The others must outlive it.
    row_rotator(const kv_group & group, const std::vector<rotation> & layers, const turn_list & list, ggml_type type,
                int n_threads);

    // All of the list. data: rows of a layer, `stride` bytes apart
    void rotate(uint32_t layer, uint8_t * data, size_t stride) { rotate(layer, list_.rows, data, stride); }
    // The same as a node of a graph, for a layer in the CPU's cache. It must not outlive this.
    ggml_tensor * node(ggml_context * ctx, uint32_t layer);
    // The same for a layer in another device's cache: fetches rows, a piece at a time, and puts them back. After a failure or an
    // exception some of them may be rotated.
    ggml_status rotate_fetched(uint32_t layer);

private:
    struct job {
        row_rotator * self;
        const rotation * how;
        const float * table;
        const std::vector<turned_row> * rows;
        uint8_t * data;
        size_t stride;
    };
    void rotate(uint32_t layer, const std::vector<turned_row> & rows, uint8_t * data, size_t stride);
    void rotate_share(const job & job, size_t thread, size_t n_threads);
    static void compute(ggml_tensor * dst, const ggml_tensor *, int ith, int nth, void * job);

    const kv_group & group_;
    const std::vector<rotation> & layers_;
    const turn_list & list_;
    const attend_kernel & kernel_;
    ggml_type type_;
    uint32_t width_;
    size_t n_threads_;
    turn_tables tables_;
    std::vector<float> scratch_; // a padded row for each thread
    std::deque<job> jobs_;       // of the nodes
};

} // namespace kvg
