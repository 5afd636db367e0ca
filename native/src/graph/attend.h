// The CPU's attention as one operation of a graph, shared out among ggml's threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include <ggml-cpp.h>

#include "cpu/kernel.h"
#include "memory/cells.h"
#include "model/hparams.h"

namespace kvg {

// What the operation needs beside its tensors. One for a context: its layers run one after the other.
class attend_workspace {
public:
    // error(KVG_DEVICE) when there is no memory for it
    attend_workspace(const hparams & h, uint32_t n_cells, int max_threads);

    // q: F32 (head_dim, n_head, n_tokens); k, v: (head_dim, n_head_kv, n_kv); mask: F16 (n_kv, n_tokens), of which the first span.n
    // * n_tokens are (span.n, n_tokens), 0 or -infinity.
    // Returns (head_dim, n_head, n_tokens). The workspace must live as long as the graph.
    // preconditions: tensors in host memory, run by the CPU's backend with at most max_threads
    ggml_tensor * attend(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask,
                         float scale);

    // Which of the cells the next computation attends to: a text that grows doesn't need a new graph.
    void set_span(const cell_span & span) { span_ = span; }
    // Which cells of the cache wait, and for what; it must live until then.
    void set_turns(const attend_turns & waiting) { waiting_ = waiting; }

    size_t bytes() const { return ggml_backend_buffer_get_size(buffer_.get()); }

private:
    static void compute(ggml_tensor * dst, int ith, int nth, void * workspace);
    void share(const attend_job & job, size_t ith);

    const attend_kernel & kernel_;
    float scale_ = 0.0f;
    cell_span span_ = {0, 0};
    attend_turns waiting_ = {};
    size_t unit_floats_; // of one token's partial results for a KV head
    size_t scratch_floats_;
    ggml_backend_buffer_ptr buffer_;
    float * scratch_; // of each thread
    float * partial_; // of all units, where a head's cells are split
    // units claimed, threads that have left, and ranges done of each block's KV head
    std::atomic<uint32_t> claimed_{0};
    std::atomic<uint32_t> left_{0};
    std::vector<std::atomic<uint32_t>> done_;
};

} // namespace kvg
