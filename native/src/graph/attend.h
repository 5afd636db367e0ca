// The CPU's attention as one operation of a graph, shared out among ggml's threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include <ggml-cpp.h>

#include "cpu/kernel.h"
#include "graph/attended.h"
#include "memory/cells.h"
#include "model/layer_spec.h"

namespace kvg {

// What cells of a group get of the attention of tokens that are observed.
struct observed_attention {
    // (n_layer, n_head_kv, n_rows): sums over tokens and the query heads that read a head of K and V, or the highest of them
    std::vector<float> of_head;
    std::vector<double> n_queries; // (n_layer), how many these are, of all heads
    size_t n_rows = 0;
    bool peaks = false;
};

// Memory for the operations of a context: its layers run one after the other.
class attend_workspace {
public:
    // error(KVG_DEVICE) when there is no memory for it
    attend_workspace(const std::vector<layer_spec> & layers, uint32_t n_cells, int max_threads);

    size_t bytes() const { return ggml_backend_buffer_get_size(buffer_.get()); }

private:
    friend class attend_op;

    size_t scratch_floats_ = 0; // of a thread
    ggml_backend_buffer_ptr buffer_;
    float * scratch_; // of each thread
    float * partial_; // of all units, where their ranges are shared out
    // units or ranges claimed, threads that have left, and ranges done of each unit
    std::atomic<uint32_t> claimed_{0};
    std::atomic<uint32_t> left_{0};
    std::vector<std::atomic<uint32_t>> done_;
    std::vector<float> shares_; // of each block of observed tokens and KV head, for each cell of the span
};

// Rows of cells from n_fresh on, in a group whose rows age; k nullptr: in another group. No graph has them, as none writes there.
struct old_rows {
    const ggml_tensor * k = nullptr;
    const ggml_tensor * v = nullptr;
    uint32_t n_fresh = 0;
};

// A layer's attention. It must live as long as the graphs that it makes nodes of.
class attend_op {
public:
    // attended: in the layer's group, set anew for each computation, so that a text that grows doesn't need a new graph
    attend_op(const layer_spec & layer, const attended_cells & attended, attend_workspace & workspace,
              const old_rows & old = {})
        : attended_(attended), old_(old), workspace_(workspace),
          kernel_(kernels_for_heads(layer.head_dim_k, layer.head_dim_v).attend), scale_(layer.scale), soft_cap_(layer.soft_cap),
          slopes_(slopes_of(layer)), n_head_kv_(layer.n_head_kv) {}

    // q: F32 (head_dim_k, n_head, n_tokens); k, v: (their head_dim, n_head_kv, n_kv); mask: F16 (n_kv, n_tokens), of which the first
    // span.n * n_tokens are (span.n, n_tokens), -infinity where a token doesn't see a cell, its columns in the order that attended_cells
    // has; sinks: F32 (n_head), or nullptr.
    // Returns (head_dim_v, n_head, n_tokens).
    // preconditions: tensors in host memory, run by the CPU's backend with at most max_threads
    ggml_tensor * node(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask,
                       ggml_tensor * sinks);

    // Which cells of the group wait, and how queries are rotated for them. Valid until the next call; the arrays must live until then.
    void set_waiting(const attend_rotations & waiting) { waiting_ = waiting; }

    // From now on each computation adds to `to` what its tokens from this one on attend to; nullptr: no more. n_tokens: of a computation.
    // place: of the layer whose K and V these are, in its group
    void observe(uint32_t from, uint32_t n_tokens, observed_attention * to, size_t place);

private:
    static std::vector<float> slopes_of(const layer_spec & layer);
    static void compute(ggml_tensor * dst, int ith, int nth, void * op);
    attend_job job_of(const ggml_tensor * dst) const;
    uint32_t block() const;
    void share(const attend_job & job, size_t ith, size_t n_threads);
    void attend_range(const attend_job & job, const attend_unit & unit, uint32_t i, uint32_t n_units, float * scratch);
    void finish(const attend_job & job, const attend_unit & unit, float * partial, float * scratch);
    float * shares_of(const attend_job & job, uint32_t token, uint32_t head_kv);
    void observe(const attend_job & job, const attend_unit & unit, float * merged, float * scratch);
    void add_observed(const attend_job & job);

    const attended_cells & attended_;
    old_rows old_;
    attend_rotations waiting_ = {};
    attend_workspace & workspace_;
    const attend_kernel & kernel_;
    float scale_;
    float soft_cap_;
    std::vector<float> slopes_; // of ALiBi, (n_head); empty: none
    uint32_t n_head_kv_;
    uint32_t observed_from_ = 0;
    observed_attention * observed_ = nullptr;
    size_t observed_place_ = 0;
};

} // namespace kvg
