// The CPU's recurrent layers as operations of a graph (cpu/recur.h), shared out among ggml's threads. States are read and written where
// they lie, by runs that are set anew for each computation, so that other sequences don't need a new graph.
#pragma once

#include <cstdint>
#include <vector>

#include <ggml-cpp.h>

#include "cpu/kernel.h"
#include "graph/recurrence.h"
#include "model/layer_spec.h"

namespace kvg {

// Memory for the operations of a context: its layers run one after the other.
class recur_workspace {
public:
    // error(KVG_DEVICE) when there is no memory for it
    // layers: those that the CPU computes
    recur_workspace(const std::vector<layer_spec> & layers, int max_threads);

    size_t bytes() const { return buffer_ ? ggml_backend_buffer_get_size(buffer_.get()) : 0; }
    float * of_thread(uint32_t i) const {
        return static_cast<float *>(ggml_backend_buffer_get_base(buffer_.get())) + i * thread_floats_;
    }

private:
    size_t thread_floats_ = 0;
    ggml_backend_buffer_ptr buffer_; // nullptr: no layer needs any
};

// A layer's. It must live as long as the graphs that it makes nodes of, which the CPU's backend runs with at most max_threads.
class recur_op : public recurrence {
public:
    // eps: of norms. offset: floats of a sequence's state before the layer's own. runs: of each computation
    recur_op(const state_spec & spec, float eps, uint64_t offset, const std::vector<recur_run> & runs,
             const recur_workspace & workspace);

    recur_kind kind() const override { return recur_kind::own; }
    ggml_tensor * convolve(builder & b, ggml_tensor * x, ggml_tensor * taps, ggml_tensor * bias) override;
    ggml_tensor * to_unit(builder & b, ggml_tensor * x) override;
    ggml_tensor * delta(builder & b, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * decay,
                        ggml_tensor * beta) override;
    ggml_tensor * scan(builder & b, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * dt, ggml_tensor * a,
                       ggml_tensor * skip) override;
    // Results with RMS norm, and what gates let through: of a delta net each head's norm, then its gate; else the gate, then each group's norm.
    // x, gate: F32 (v_width, n_tokens), rows of the gate any distance apart; weight: (a head's or all groups' widths). Returns
    // (v_width, n_tokens).
    ggml_tensor * pass_gate(builder & b, ggml_tensor * x, ggml_tensor * gate, ggml_tensor * weight);
    // The name of the operation that a device would have in place of the node; "": a step beside it; nullptr: it is none of these.
    static const char * name_of(const ggml_tensor * node);

private:
    static void run_convolve(ggml_tensor * dst, int ith, int nth, void * op);
    static void run_delta(ggml_tensor * dst, int ith, int nth, void * op);
    static void run_scan(ggml_tensor * dst, int ith, int nth, void * op);
    void compute(ggml_tensor * dst, int ith, int nth) const;
    static void run_to_unit(ggml_tensor * dst, int ith, int nth, void * op);
    static void run_pass_gate(ggml_tensor * dst, int ith, int nth, void * op);
    ggml_tensor * recall(builder & b, const std::vector<ggml_tensor *> & args, ggml_custom_op_t run);
    recur_runs runs_from(uint64_t offset) const { return {runs_.data(), static_cast<uint32_t>(runs_.size()), offset}; }

    const state_spec spec_;
    const float eps_;
    const uint64_t offset_;
    const std::vector<recur_run> & runs_;
    const recur_workspace & workspace_;
};

} // namespace kvg
