// What the update graphs (K-shift, defrag) share: each is its own small graph on an allocator of its own, so that a reserved
// decode graph stays reserved. No scheduler: it reorders nodes, and these graphs work in place.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include <ggml-cpp.h>

namespace kvg {

// The device side, kept by a context: one backend, one allocator, reused from graph to graph.
class update_runner {
public:
    explicit update_runner(ggml_backend_t backend) : backend_(backend) { renew_allocator(); }

    ggml_backend_t backend() const { return backend_; }
    ggml_gallocr_t allocator() const { return allocator_.get(); }
    // One that got no memory takes the next graph of that shape for allocated, so it must not be used again.
    void renew_allocator();
    // graphs computed so far
    int64_t n_graphs() const { return n_graphs_; }
    void count_graph() { ++n_graphs_; }

private:
    ggml_backend_t backend_;
    ggml_gallocr_ptr allocator_;
    int64_t n_graphs_ = 0;
};

// One graph being built: add nodes in the order in which they must run, then run() once.
class update_graph {
public:
    // `what` ("shift", "defrag") names it in errors.
    update_graph(const char * what, size_t max_nodes);

    ggml_context * ctx() const { return ctx_.get(); }
    // Filled with the values, int32_t or int64_t, when the graph runs.
    template <class T> ggml_tensor * input(const std::vector<T> & values) {
        static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, int64_t>);
        return input(sizeof(T) == sizeof(int32_t) ? GGML_TYPE_I32 : GGML_TYPE_I64, values.data(), values.size());
    }
    // Order is kept: a write after a read is no edge, only its place in the graph.
    void add(ggml_tensor * node);
    // Allocates and computes. Before the compute nothing is touched: error(KVG_DEVICE). Returns false when the compute itself
    // failed, which may have happened half way.
    bool run(update_runner & runner);

private:
    ggml_tensor * input(ggml_type type, const void * values, size_t n);

    const char * what_;
    std::vector<uint8_t> arena_; // ggml would abort where this throws
    ggml_context_ptr ctx_;
    ggml_cgraph * graph_;
    std::vector<std::pair<ggml_tensor *, std::vector<uint8_t>>> inputs_;
};

} // namespace kvg
