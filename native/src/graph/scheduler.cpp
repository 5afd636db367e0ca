#include "graph/scheduler.h"

#include "device.h"
#include "error.h"
#include "fault.h"

namespace kvg {

scheduler::scheduler(const backends & backends, size_t max_tensors) : backends_(backends), max_tensors_(max_tensors) {
    renew();
}

// Inputs are written on the host: where the first device can copy from them faster, if it has such memory.
static ggml_backend_buffer_type_t compute_buffer(ggml_backend_t backend, ggml_backend_t first) {
    ggml_backend_dev_t device = ggml_backend_get_device(backend);
    ggml_backend_buffer_type_t pinned =
        is_cpu(device) ? ggml_backend_dev_host_buffer_type(ggml_backend_get_device(first)) : nullptr;
    return pinned ? pinned : ggml_backend_get_default_buffer_type(backend);
}

void scheduler::renew() {
    std::vector<ggml_backend_t> all = backends_.all();
    std::vector<ggml_backend_buffer_type_t> types;
    for (ggml_backend_t backend : all) {
        types.push_back(compute_buffer(backend, all.front()));
    }
    sched_.reset(ggml_backend_sched_new(all.data(), types.data(), static_cast<int>(all.size()), max_tensors_,
                                        /*parallel*/ false,
                                        /*op_offload*/ false));
    if (!sched_) {
        fail(KVG_DEVICE, "out of host memory for ggml's scheduler");
    }
}

void scheduler::assign(const decode_graph & graph) {
    for (const auto & [node, device] : graph.wishes()) {
        ggml_backend_t backend = can_run(device, node) ? backends_.of(device) : backends_.cpu();
        ggml_backend_sched_set_tensor_backend(sched_.get(), node, backend);
    }
}

// ggml measures without our wishes.
std::vector<size_t> scheduler::estimate(const decode_graph & graph) {
    std::vector<size_t> sizes(backends_.all().size());
    ggml_backend_sched_reserve_size(sched_.get(), graph.graph(), sizes.data());
    renew(); // it has seen the graph, and changed its sources
    return sizes;
}

bool scheduler::reserve(const decode_graph & graph) {
    ggml_backend_sched_reset(sched_.get());
    assign(graph);
    return ggml_backend_sched_reserve(sched_.get(), graph.graph());
}

bool scheduler::allocate(const decode_graph & graph) {
    ggml_backend_sched_reset(sched_.get());
    assign(graph);
    if (fault_hit("alloc") || !ggml_backend_sched_alloc_graph(sched_.get(), graph.graph())) {
        renew(); // the old one would take the next graph of this shape for allocated
        return false;
    }
    return true;
}

bool scheduler::compute(const decode_graph & graph) {
    return computed([&] { return ggml_backend_sched_graph_compute(sched_.get(), graph.graph()); });
}

std::vector<size_t> scheduler::sizes() const {
    std::vector<size_t> sizes;
    for (ggml_backend_t backend : backends_.all()) {
        sizes.push_back(ggml_backend_sched_get_buffer_size(sched_.get(), backend));
    }
    return sizes;
}

} // namespace kvg
