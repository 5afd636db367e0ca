// Runs decode graphs: each node on the device that the graph wants it on, or on the CPU where that device can't run it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ggml-cpp.h>

#include "backends.h"
#include "graph/carrier.h"
#include "graph/frame.h"
#include "graph/parts.h"
#include "graph/tap.h"

namespace kvg {

class scheduler {
public:
    // max_tensors: of a graph, nodes and leafs. This and what takes a graph: error(KVG_DEVICE) when the host has no memory.
    scheduler(const backends & backends, size_t max_tensors);

    // About how many bytes the graph takes on each device, in the order of backends; sizes() after reserve() says exactly.
    // This and reserve(): error(KVG_DEVICE) when a device can't write rows into cells of this size.
    std::vector<size_t> estimate(const decode_graph & graph);
    // Memory for a graph of this size and all smaller ones. False when there is none.
    bool reserve(const decode_graph & graph);
    // The graph that compute() will run, in place of the one before. False when a device has no memory for it.
    bool allocate(const decode_graph & graph);
    // carrier: of its working rows; taps: of what it writes. nullptr: there are none. False when a device failed. A graph without outputs,
    // carrier and taps may still be computed afterwards: see backends::wait().
    bool compute(const decode_graph & graph, carrier * carrier, taps * taps);
    // bytes held on each device, in the order of backends
    std::vector<size_t> sizes() const;

private:
    ggml_backend_sched_t sched();
    ggml_backend_sched_t ready();
    void assign(const decode_graph & graph);
    void require_homes(const decode_graph & graph) const;
    ggml_status compute_parts(carrier * carrier);

    const backends & backends_;
    size_t max_tensors_;
    ggml_backend_sched_ptr sched_;       // nullptr: to be made anew
    std::unique_ptr<graph_parts> parts_; // of the graph that was allocated; nullptr: ggml's scheduler computes it whole
};

} // namespace kvg
