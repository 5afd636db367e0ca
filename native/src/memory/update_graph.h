// What the update graphs (K-shift, defrag) share: each is its own small graph on an allocator of its own, so that a reserved
// decode graph stays reserved. No scheduler: it reorders nodes, and these graphs work in place.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "memory/kv_group.h"

namespace kvg {

// One graph being built, for one part of a group: add nodes in the order in which they must run.
class update_graph {
public:
    // `what` ("shift", "defrag") names it in errors.
    update_graph(const char * what, size_t max_nodes);

    ggml_context * ctx() const { return ctx_.get(); }
    // Filled with the values, int32_t, int64_t or float, when the graph runs.
    template <class T> ggml_tensor * input(const std::vector<T> & values) {
        static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, int64_t> || std::is_same_v<T, float>);
        constexpr ggml_type TYPE = std::is_same_v<T, float>     ? GGML_TYPE_F32
                                   : std::is_same_v<T, int32_t> ? GGML_TYPE_I32
                                                                : GGML_TYPE_I64;
        return input(TYPE, values.data(), values.size());
    }
    // Order is kept: a write after a read is no edge, only its place in the graph.
    void add(ggml_tensor * node);

    bool is_empty() const { return ggml_graph_n_nodes(graph_) == 0; }
    // The steps of run_graphs. error(KVG_DEVICE)
    void allocate(kv_part & part);
    bool start(const kv_part & part);
    bool finish(const kv_part & part);

private:
    ggml_tensor * input(ggml_type type, const void * values, size_t n);

    const char * what_;
    std::vector<uint8_t> arena_; // ggml would abort where this throws
    ggml_context_ptr ctx_;
    ggml_cgraph * graph_;
    std::vector<std::pair<ggml_tensor *, std::vector<uint8_t>>> inputs_;
};

// One graph for each part of a group, in the order of its parts; devices have nothing to do with those that are empty.
// All are allocated before the first is computed: until then nothing is touched. error(KVG_DEVICE)
void allocate_graphs(kv_group & group, std::vector<update_graph> & graphs);
// Devices compute at the same time. nullptr when all went well; else the backend that failed, which may have happened half way, and
// others may have come to their end.
ggml_backend_t compute_graphs(kv_group & group, std::vector<update_graph> & graphs);
// Both.
ggml_backend_t run_graphs(kv_group & group, std::vector<update_graph> & graphs);

} // namespace kvg
