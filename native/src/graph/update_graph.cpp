#include "graph/update_graph.h"

#include <string>

#include "device.h"
#include "error.h"
#include "fault.h"

namespace kvg {

void update_runner::renew_allocator() { allocator_.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend_))); }

update_graph::update_graph(const char * what, size_t max_nodes) : what_(what) {
    fault_point((std::string(what) + "-build").c_str());
    // a node may bring a view and an input along
    const size_t size = max_nodes * 3 * ggml_tensor_overhead() + ggml_graph_overhead_custom(max_nodes * 3, false);
    arena_.resize(size);
    ctx_.reset(ggml_init({size, arena_.data(), /*no_alloc*/ true}));
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

bool update_graph::run(update_runner & runner) {
    if (fault_hit((std::string(what_) + "-alloc").c_str()) || !ggml_gallocr_alloc_graph(runner.allocator(), graph_)) {
        runner.renew_allocator();
        fail(KVG_DEVICE, "%s has no memory for the %s graph's scratch", ggml_backend_name(runner.backend()), what_);
    }
    for (const auto & [tensor, bytes] : inputs_) {
        ggml_backend_tensor_set(tensor, bytes.data(), 0, bytes.size());
    }
    runner.count_graph();
    const bool done = computed([&] { return ggml_backend_graph_compute(runner.backend(), graph_); });
    return done && !fault_hit((std::string(what_) + "-compute").c_str());
}

} // namespace kvg
