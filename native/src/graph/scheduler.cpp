#include "graph/scheduler.h"

#include <algorithm>

#include "device.h"
#include "error.h"
#include "host_memory.h"

namespace kvg {

scheduler::scheduler(const backends & backends, size_t max_tensors) : backends_(backends), max_tensors_(max_tensors) {
    sched();
}

// Inputs are written on the host: where the first device can copy from them faster, if it has such memory.
static ggml_backend_buffer_type_t compute_buffer(ggml_backend_t backend, ggml_backend_t first) {
    ggml_backend_dev_t device = ggml_backend_get_device(backend);
    ggml_backend_buffer_type_t pinned =
        is_cpu(device) ? ggml_backend_dev_host_buffer_type(ggml_backend_get_device(first)) : nullptr;
    return pinned ? pinned : ggml_backend_get_default_buffer_type(backend);
}

// What ggml_backend_sched_new allocates, and doesn't check: tables for as many splits as there are tensors, each with 30 inputs, and two
// structs for each input.
static size_t scheduler_bytes(size_t max_tensors, size_t n_backends) {
    constexpr size_t SPLIT_INPUTS = 30;
    const size_t hashed = 2 * max_tensors + 64; // the next prime after a power of two
    return hashed * (sizeof(void *) + 1 + sizeof(int) + n_backends * sizeof(void *)) +
           4 * sizeof(int) * max_tensors * (1 + 2 * SPLIT_INPUTS) + 2 * SPLIT_INPUTS * max_tensors * sizeof(ggml_tensor) +
           ggml_graph_overhead_custom(max_tensors, false);
}

// The one there is, or a new one.
ggml_backend_sched_t scheduler::sched() {
    if (!sched_) {
        std::vector<ggml_backend_t> all = backends_.all();
        std::vector<ggml_backend_buffer_type_t> types;
        for (ggml_backend_t backend : all) {
            types.push_back(compute_buffer(backend, all.front()));
        }
        require_host_memory(scheduler_bytes(max_tensors_, all.size()), "the scheduler");
        sched_.reset(ggml_backend_sched_new(all.data(), types.data(), static_cast<int>(all.size()), max_tensors_,
                                            /*parallel*/ false,
                                            /*op_offload*/ false));
    }
    return sched_.get();
}

// For a graph: its tables grow without a check, too.
ggml_backend_sched_t scheduler::ready() {
    ggml_backend_sched_t sched = this->sched();
    require_host_memory(TABLES_PER_TENSOR * max_tensors_, "a graph's tables");
    return sched;
}

void scheduler::assign(const decode_graph & graph) {
    for (const auto & [node, device] : graph.wishes()) {
        ggml_backend_t backend = can_run(device, node) ? backends_.of(device) : backends_.cpu();
        ggml_backend_sched_set_tensor_backend(sched_.get(), node, backend);
    }
}

// A node that writes into memory that is there runs on the device of that memory; where it can't, ggml ends the process. Vulkan takes
// tensors up to the size that its driver has shaders read.
void scheduler::require_homes(const decode_graph & graph) const {
    const std::vector<ggml_backend_t> all = backends_.all();
    for (int i = 0; i < ggml_graph_n_nodes(graph.graph()); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph.graph(), i);
        const ggml_tensor * there = node->view_src ? node->view_src : node;
        if (!there->buffer) {
            continue;
        }
        ggml_backend_buffer_type_t type = ggml_backend_buffer_get_type(there->buffer);
        const auto runs = [&](ggml_backend_t backend) {
            return ggml_backend_supports_buft(backend, type) && ggml_backend_supports_op(backend, node);
        };
        if (std::none_of(all.begin(), all.end(), runs)) {
            fail(KVG_DEVICE, "%s can't run %s on a tensor of %s; use a smaller n_ctx", ggml_backend_buft_name(type),
                 ggml_op_desc(node), format_bytes(ggml_nbytes(there)).c_str());
        }
    }
}

// ggml measures without our wishes.
std::vector<size_t> scheduler::estimate(const decode_graph & graph) {
    require_homes(graph);
    std::vector<size_t> sizes(backends_.all().size());
    ggml_backend_sched_reserve_size(ready(), graph.graph(), sizes.data());
    sched_.reset(); // it has seen the graph, and changed its sources
    return sizes;
}

bool scheduler::reserve(const decode_graph & graph) {
    require_homes(graph);
    ggml_backend_sched_reset(ready());
    assign(graph);
    return ggml_backend_sched_reserve(sched_.get(), graph.graph());
}

bool scheduler::allocate(const decode_graph & graph) {
    ggml_backend_sched_reset(ready());
    assign(graph);
    const bool has_parts = !graph.turns().empty() || (graph.shape().n_outputs == 0 && backends_.all().size() > 2);
    parts_ = has_parts ? std::make_unique<graph_parts>(graph) : nullptr;
    if (!ggml_backend_sched_alloc_graph(sched_.get(), graph.graph())) {
        sched_.reset(); // it would take the next graph of this shape for allocated
        return false;
    }
    if (parts_) {
        parts_->cut(sched_.get());
    }
    return true;
}

// Who does something between the nodes of a graph. Either may be nullptr.
struct onlookers {
    class carrier * carrier;
    class taps * taps;

    // For ggml_backend_sched_set_eval_callback: asked before a node, and told when a node for which the answer was true is computed.
    static bool at_node(ggml_tensor * node, bool ask, void * self) {
        const auto [carrier, taps] = *static_cast<onlookers *>(self);
        const bool is_turn = carrier && carrier::at_node(node, true, carrier);
        const bool is_tapped = taps && taps->asks(node);
        if (ask) {
            return is_turn || is_tapped;
        }
        if (is_tapped) {
            taps->computed();
        }
        return !is_turn || carrier::at_node(node, false, carrier);
    }
};

// Each part as soon as that before it is given, too. A device is waited for where another one goes on, as ggml's scheduler does, and before
// what it may still read of the graph before is overwritten. Copies are made at once, so that nothing of this graph is read later elsewhere.
ggml_status scheduler::compute_parts(carrier * carrier) {
    ggml_backend_t last = nullptr;
    for (const graph_part & part : parts_->all()) {
        for (ggml_backend_t backend :
             {part.backend && part.backend != last ? last : nullptr, part.copied.empty() ? nullptr : part.backend}) {
            if (backend) {
                ggml_backend_synchronize(backend);
            }
        }
        for (const auto & [from, to] : part.copied) {
            ggml_backend_tensor_copy(from, to);
        }
        if (carrier && part.turn && !carrier->give(*part.turn)) {
            return GGML_STATUS_FAILED;
        }
        if (part.backend) {
            const ggml_status status = ggml_backend_graph_compute_async(part.backend, part.graph);
            if (status != GGML_STATUS_SUCCESS) {
                return status;
            }
            last = part.backend;
        }
        if (carrier && part.turn && !carrier->given(*part.turn)) {
            return GGML_STATUS_FAILED;
        }
    }
    return GGML_STATUS_SUCCESS;
}

bool scheduler::compute(const decode_graph & graph, carrier * carrier, taps * taps) {
    if (carrier && parts_ && !taps && carrier->begin_ahead(graph)) {
        return carrier->finish(computed([&] { return compute_parts(carrier); }));
    }
    if (parts_ && !carrier && !taps) {
        return computed([&] { return compute_parts(nullptr); });
    }
    const auto run = [&] { return ggml_backend_sched_graph_compute(sched_.get(), graph.graph()); };
    onlookers all = {carrier, taps};
    const bool has_any = carrier || taps;
    ggml_backend_sched_set_eval_callback(sched_.get(), has_any ? onlookers::at_node : nullptr, has_any ? &all : nullptr);
    if (taps) {
        taps->begin(graph);
    }
    const bool is_computed = (!carrier || carrier->begin(graph)) && computed(run);
    return carrier ? carrier->finish(is_computed) : is_computed;
}

std::vector<size_t> scheduler::sizes() const {
    std::vector<size_t> sizes;
    for (ggml_backend_t backend : backends_.all()) {
        sizes.push_back(sched_ ? ggml_backend_sched_get_buffer_size(sched_.get(), backend) : 0);
    }
    return sizes;
}

} // namespace kvg
