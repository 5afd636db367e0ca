// Decode graphs in memory, so that a shape that comes back is not built again: ggml's scheduler holds one graph at a time, so a few
// small graphs have a scheduler each, and all others share the one that has memory for the largest.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <vector>

#include "backends.h"
#include "graph/frame.h"
#include "graph/scheduler.h"

namespace kvg {

class graph_cache {
public:
    // A graph of so few tokens takes little memory, and little time: building it again would be felt.
    static constexpr uint32_t SMALL_TOKENS = 32;

    // max_tensors: of any graph, nodes and leafs. error(KVG_DEVICE) when the host has no memory
    graph_cache(const backends & backends, size_t max_tensors)
        : backends_(backends), max_tensors_(max_tensors), shared_(backends, max_tensors) {}

    // About how many bytes the largest graph takes on each device, in the order of backends.
    std::vector<size_t> estimate(const decode_graph & largest) { return shared_.scheduler.estimate(largest); }
    // About how many bytes there are on each device, in the order of backends, when as many graphs are kept as can be: the largest, and
    // small ones of this size. exactly: by taking that much for a moment, first of the one and then of the other; empty when it isn't there.
    std::vector<size_t> most(const decode_graph & largest, const decode_graph & small, bool exactly) const;
    // Memory for a graph of this size and all smaller ones, and for one of a single token, which every answer keeps beside it. False
    // when there is none.
    bool reserve(const decode_graph & largest, const decode_graph & single);
    // bytes held on each device, in the order of backends
    std::vector<size_t> sizes() const;

    // The graph of that shape: the one that is kept, or what make() returns, allocated. It is the current one then. nullptr when there is
    // no memory for it.
    decode_graph * take(const decode_shape & shape, const std::function<std::unique_ptr<decode_graph>()> & make);
    // Computes the current graph; carrier, taps: as scheduler::compute() takes them. False when a device failed.
    bool compute(carrier * carrier, taps * taps);
    size_t max_tensors() const { return max_tensors_; }
    // No graph that there is may be used again; their memory is kept for others.
    void forget();
    // The current graph is not to be used again.
    void drop() { current_->graph.reset(); }

private:
    // A graph, and the scheduler that gave it memory.
    struct place {
        place(const backends & backends, size_t max_tensors) : scheduler(backends, max_tensors) {}
        bool holds(const decode_shape & shape) const { return graph && graph->shape() == shape; }
        bool put(std::unique_ptr<decode_graph> made);

        class scheduler scheduler;
        std::unique_ptr<decode_graph> graph; // nullptr: none
    };
    bool find(const decode_shape & shape);
    bool keep(std::unique_ptr<decode_graph> made);

    const backends & backends_;
    size_t max_tensors_;
    place shared_;
    std::list<place> small_; // the last used first; one that has no graph yet is the last
    place * current_ = &shared_;
};

} // namespace kvg
