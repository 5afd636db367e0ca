// Recurrent layers by ggml's operations, on the device that has their states.
#pragma once

#include <vector>

#include "graph/recurrence.h"
#include "graph/state_segments.h"
#include "memory/state_rows.h"
#include "model/layer_spec.h"

namespace kvg {

// What a graph is told of a group's segments.
struct state_inputs {
    ggml_tensor * from; // I32 (n_seqs)
    ggml_tensor * to;   // I64 (n_seqs)
};

// A layer's, in one graph.
class recur_ggml : public recurrence {
public:
    // eps: of norms. groups, in: of the graph; tokens come in their order
    recur_ggml(const state_spec & spec, float eps, const state_tensors & rows, const std::vector<state_group> & groups,
               const std::vector<state_inputs> & in)
        : spec_(spec), eps_(eps), rows_(rows), groups_(groups), in_(in) {}

    recur_kind kind() const override { return recur_kind::ggml; }
    ggml_tensor * convolve(builder & b, ggml_tensor * x, ggml_tensor * taps, ggml_tensor * bias) override;
    ggml_tensor * to_unit(builder & b, ggml_tensor * x) override;
    ggml_tensor * delta(builder & b, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * decay,
                        ggml_tensor * beta) override;
    ggml_tensor * scan(builder & b, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * dt, ggml_tensor * a,
                       ggml_tensor * skip) override;

private:
    template <class F> ggml_tensor * by_group(builder & b, F result_of);
    ggml_tensor * for_heads(builder & b, ggml_tensor * heads) const;
    ggml_tensor * split(builder & b, ggml_tensor * made, size_t group);

    const state_spec & spec_;
    float eps_;
    state_tensors rows_; // once a graph's groups before have written theirs
    const std::vector<state_group> & groups_;
    const std::vector<state_inputs> & in_;
};

// Whether the device runs all of it for such a layer, with n_rows rows of states there.
bool can_recur_on(ggml_backend_dev_t device, const state_spec & spec, uint32_t n_rows);

} // namespace kvg
