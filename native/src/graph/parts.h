// A graph in parts that are given to devices one after the other, so that something comes between them without anybody waiting: ggml's
// scheduler, asked to stop between two nodes, waits for the device each time.
#pragma once

#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ggml-cpp.h>

#include "graph/frame.h"

namespace kvg {

struct graph_part {
    ggml_backend_t backend; // nullptr: there is nothing to compute
    ggml_cgraph * graph;
    std::optional<size_t> turn;                                  // that begins with it
    std::vector<std::pair<ggml_tensor *, ggml_tensor *>> copied; // before it: from where on another device, and to where
};

class graph_parts {
public:
    // Before the scheduler allocates the graph: it puts copies in place of what comes from other devices.
    explicit graph_parts(const decode_graph & graph);
    // Once it has. A part ends where a turn begins, and where the next node is on another device. error(KVG_DEVICE) without host memory
    void cut(ggml_backend_sched_t sched);

    // in the order in which they are computed; they live as long as the graph
    const std::vector<graph_part> & all() const { return parts_; }

private:
    ggml_cgraph * graph_of(const std::vector<ggml_tensor *> & nodes);

    const decode_graph & graph_;
    std::unordered_map<ggml_tensor *, std::vector<ggml_tensor *>> sources_; // of each node, before any were replaced
    std::vector<graph_part> parts_;
    std::vector<ggml_context_ptr> contexts_; // of the parts' graphs
};

} // namespace kvg
