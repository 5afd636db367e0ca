// The CPU's recurrent layers as operations of a graph (cpu/recur.h), shared out among ggml's threads. States are read and written where
// they lie, by runs that are set anew for each computation, so that other sequences don't need a new graph.
#pragma once

#include <cstdint>
#include <vector>

#include <ggml-cpp.h>

#include "cpu/kernel.h"
#include "graph/builder.h"
#include "model/layer_spec.h"

namespace kvg {

// Memory for the operations of a context: its layers run one after the other.
class recur_workspace {
public:
    // error(KVG_DEVICE) when there is no memory for it
    recur_workspace(const std::vector<layer_spec> & layers, int max_threads);

    size_t bytes() const { return buffer_ ? ggml_backend_buffer_get_size(buffer_.get()) : 0; }
    float * of_thread(uint32_t i) const {
        return static_cast<float *>(ggml_backend_buffer_get_base(buffer_.get())) + i * thread_floats_;
    }

private:
    size_t thread_floats_ = 0;
    ggml_backend_buffer_ptr buffer_; // nullptr: no layer needs any
};

// A layer's. It must live as long as the graphs that it makes nodes of.
class recur_op {
public:
    // eps: of norms. offset: floats of a sequence's state before the layer's own. runs: of each computation
    recur_op(const state_spec & spec, float eps, uint64_t offset, const std::vector<recur_run> & runs,
             const recur_workspace & workspace);

    // Of the last n_taps inputs of each channel. x: F32 (n_channels, n_tokens); taps: F32 (n_taps, n_channels); bias: F32 (n_channels), or
    // nullptr. Returns (n_channels, n_tokens).
    ggml_tensor * convolve(builder & b, ggml_tensor * x, ggml_tensor * taps, ggml_tensor * bias);
    // q, k: F32 (head_dim_k, n_head_k, n_tokens); v: (head_dim_v, n_head, n_tokens); decay, beta: (n_head, n_tokens), where
    // dimensions of K decay by themselves decay: (head_dim_k, n_head, n_tokens); skip: F32, a number for each head, or nullptr. Returns
    // (head_dim_v, n_head, n_tokens).
    // precondition: run by the CPU's backend with at most max_threads
    ggml_tensor * recall(builder & b, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * decay,
                         ggml_tensor * beta, ggml_tensor * skip);
    // Heads of Q and K, each divided by its length. x: F32 (2 k_width, n_tokens). Returns the same shape.
    ggml_tensor * to_unit(builder & b, ggml_tensor * x);
    // Results with RMS norm, and what gates let through: of a delta net each head's norm, then its gate; else the gate, then each group's norm.
    // x, gate: F32 (v_width, n_tokens), rows of the gate any distance apart; weight: (a head's or all groups' widths). Returns
    // (v_width, n_tokens).
    ggml_tensor * pass_gate(builder & b, ggml_tensor * x, ggml_tensor * gate, ggml_tensor * weight);

private:
    static void run_convolve(ggml_tensor * dst, int ith, int nth, void * op);
    static void run_recall(ggml_tensor * dst, int ith, int nth, void * op);
    static void run_to_unit(ggml_tensor * dst, int ith, int nth, void * op);
    static void run_pass_gate(ggml_tensor * dst, int ith, int nth, void * op);
    recur_runs runs_from(uint64_t offset) const { return {runs_.data(), static_cast<uint32_t>(runs_.size()), offset}; }

    const state_spec spec_;
    const float eps_;
    const uint64_t offset_;
    const std::vector<recur_run> & runs_;
    const recur_workspace & workspace_;
};

} // namespace kvg
