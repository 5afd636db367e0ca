#include "memory/update_graph.h"

#include <algorithm>
#include <string>

#include "device.h"
#include "error.h"
#include "fault.h"
#include "host_memory.h"

namespace kvg {

update_graph::update_graph(const char * what, size_t max_nodes) : what_(what) {
    fault_point((std::string(what) + "-build").c_str());
    // a node may bring a view and an input along
    const size_t size = max_nodes * 3 * ggml_tensor_overhead() + ggml_graph_overhead_custom(max_nodes * 3, false);
    arena_.resize(size);
    ctx_ = new_ggml_context(size, arena_.data());
    graph_ = ggml_new_graph_custom(ctx_.get(), max_nodes * 3, false);
}

ggml_tensor * update_graph::input(ggml_type type, const void * values, size_t n) {
    ggml_tensor * t = ggml_new_tensor_1d(ctx_.get(), type, static_cast<int64_t>(n));
    ggml_set_input(t);
    const auto * bytes = static_cast<const uint8_t *>(values);
    inputs_.emplace_back(t, std::vector<uint8_t>(bytes, bytes + ggml_nbytes(t)));
    return t;
}

void update_graph::add(ggml_tensor * node) { ggml_build_forward_expand(graph_, node); }

void update_graph::allocate(kv_part & part) {
    const auto n_tensors = static_cast<size_t>(ggml_graph_size(graph_));
    require_host_memory(TABLES_PER_TENSOR * n_tensors, "a graph's tables");
    if (!part.allocator) {
        part.allocator.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(part.backend)));
    }
    if (fault_hit((std::string(what_) + "-alloc").c_str()) || !ggml_gallocr_alloc_graph(part.allocator.get(), graph_)) {
        part.allocator.reset(); // one that got no memory takes the next graph of that shape for allocated
        fail(KVG_DEVICE, "%s has no memory for the %s graph's scratch", ggml_backend_name(part.backend), what_);
    }
}

bool update_graph::start(const kv_part & part) {
    return computed([&] {
        for (const auto & [tensor, bytes] : inputs_) {
            ggml_backend_tensor_set(tensor, bytes.data(), 0, bytes.size());
        }
        return ggml_backend_graph_compute_async(part.backend, graph_);
    });
}

bool update_graph::finish(const kv_part & part) {
    const bool done = computed([&] {
        ggml_backend_synchronize(part.backend);
        return GGML_STATUS_SUCCESS;
    });
    return done && !fault_hit((std::string(what_) + "-compute").c_str());
}

void allocate_graphs(kv_group & group, std::vector<update_graph> & graphs) {
    for (size_t i = 0; i < graphs.size(); ++i) {
        if (!graphs[i].is_empty()) {
            graphs[i].allocate(group.parts()[i]);
        }
    }
}

ggml_backend_t compute_graphs(kv_group & group, std::vector<update_graph> & graphs) {
    const std::vector<kv_part> & parts = group.parts();
    std::vector<size_t> order;
    for (size_t i = 0; i < graphs.size(); ++i) {
        if (!graphs[i].is_empty()) { // which some backends refuse by an assertion
            order.push_back(i);
        }
    }
    // the CPU last: starting its graph takes until that has been computed
    std::stable_partition(order.begin(), order.end(), [&](size_t i) { return !is_cpu(parts[i].device); });
    size_t n_started = 0;
    ggml_backend_t failed = nullptr;
    while (n_started < order.size() && !failed) {
        const size_t i = order[n_started++];
        group.count_graph();
        failed = graphs[i].start(parts[i]) ? nullptr : parts[i].backend;
    }
    for (size_t n = 0; n < n_started; ++n) {
        const size_t i = order[n];
        failed = graphs[i].finish(parts[i]) ? failed : parts[i].backend;
    }
    return failed;
}

ggml_backend_t run_graphs(kv_group & group, std::vector<update_graph> & graphs) {
    allocate_graphs(group, graphs);
    return compute_graphs(group, graphs);
}

} // namespace kvg
