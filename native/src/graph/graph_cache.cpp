#include "graph/graph_cache.h"

#include <iterator>

#include "error.h"
#include "fault.h"

namespace kvg {

static constexpr size_t MAX_SMALL = 8;

std::vector<size_t> graph_cache::most(const decode_graph & largest, const decode_graph & small, bool exactly) const {
    const auto bytes_of = [&](const decode_graph & graph) {
        class scheduler scheduler(backends_, max_tensors_);
        if (!exactly) {
            return scheduler.estimate(graph);
        }
        return scheduler.reserve(graph) ? scheduler.sizes() : std::vector<size_t>();
    };
    std::vector<size_t> sizes = bytes_of(largest);
    const std::vector<size_t> kept = bytes_of(small);
    if (kept.empty()) {
        return kept;
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
        sizes[i] += MAX_SMALL * kept[i];
    }
    return sizes;
}

std::vector<size_t> graph_cache::sizes() const {
    std::vector<size_t> sizes = shared_.scheduler.sizes();
    for (const place & p : small_) {
        const std::vector<size_t> more = p.scheduler.sizes();
        for (size_t i = 0; i < sizes.size(); ++i) {
            sizes[i] += more[i];
        }
    }
    return sizes;
}

bool graph_cache::reserve(const decode_graph & largest, const decode_graph & single) {
    return shared_.scheduler.reserve(largest) && small_.emplace_back(backends_, max_tensors_).scheduler.reserve(single);
}

bool graph_cache::place::put(std::unique_ptr<decode_graph> made) {
    graph.reset(); // its memory is given away
    if (!scheduler.allocate(*made)) {
        return false;
    }
    graph = std::move(made);
    return true;
}

// Makes it the current one if it is there.
bool graph_cache::find(const decode_shape & shape) {
    if (current_->holds(shape)) {
        return true;
    }
    for (auto it = small_.begin(); it != small_.end(); ++it) {
        if (it->holds(shape)) {
            small_.splice(small_.begin(), small_, it);
            current_ = &small_.front();
            return true;
        }
    }
    current_ = &shared_;
    return shared_.holds(shape);
}

// Makes a small graph the current one, with memory of its own. False when there is none: what is shared must do.
bool graph_cache::keep(std::unique_ptr<decode_graph> made) {
    std::list<place> one; // freed where it fails
    try {
        const bool is_full = small_.size() == MAX_SMALL || (!small_.empty() && !small_.back().graph);
        if (!is_full) {
            one.emplace_back(backends_, max_tensors_);
        } else {
            one.splice(one.begin(), small_, std::prev(small_.end()));
        }
        if (fault_hit("alloc-kept") || !one.front().put(std::move(made))) {
            return false;
        }
    } catch (const error & e) {
        if (e.status() != KVG_DEVICE) {
            throw;
        }
        return false;
    }
    small_.splice(small_.begin(), one);
    current_ = &small_.front();
    return true;
}

decode_graph * graph_cache::take(const decode_shape & shape, const std::function<std::unique_ptr<decode_graph>()> & make) {
    if (find(shape)) {
        return current_->graph.get();
    }
    if (fault_hit("alloc")) {
        return nullptr;
    }
    const bool kept = shape.n_tokens <= SMALL_TOKENS && keep(make());
    if (!kept && !current_->put(make())) {
        return nullptr;
    }
    return current_->graph.get();
}

void graph_cache::forget() {
    shared_.graph.reset();
    for (place & each : small_) {
        each.graph.reset();
    }
    current_ = &shared_;
}

bool graph_cache::compute(carrier * carrier, taps * taps) {
    return current_->scheduler.compute(*current_->graph, carrier, taps);
}

} // namespace kvg
