#include "graph/parts.h"

#include <algorithm>
#include <set>

#include "host_memory.h"

namespace kvg {

namespace {

std::vector<ggml_tensor *> sources_of(const ggml_tensor * node) { return {std::begin(node->src), std::end(node->src)}; }

bool is_view(const ggml_tensor * node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_VIEW || node->op == GGML_OP_PERMUTE ||
           node->op == GGML_OP_TRANSPOSE;
}

// While it lives, tensors are leafs: a graph of nodes that use them has them, and nothing behind them.
class as_leafs {
public:
    explicit as_leafs(const std::set<ggml_tensor *> & tensors) {
        for (ggml_tensor * t : tensors) {
            kept_.push_back({t, t->op, sources_of(t)});
            t->op = GGML_OP_NONE;
            std::fill(std::begin(t->src), std::end(t->src), nullptr);
        }
    }
    as_leafs(const as_leafs &) = delete;
    as_leafs & operator=(const as_leafs &) = delete;
    ~as_leafs() {
        for (const kept & k : kept_) {
            k.tensor->op = k.op;
            std::copy(k.sources.begin(), k.sources.end(), std::begin(k.tensor->src));
        }
    }

private:
    struct kept {
        ggml_tensor * tensor;
        ggml_op op;
        std::vector<ggml_tensor *> sources;
    };
    std::vector<kept> kept_;
};

} // namespace

graph_parts::graph_parts(const decode_graph & graph) : graph_(graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph.graph()); ++i) {
        ggml_tensor * node = ggml_graph_node(graph.graph(), i);
        sources_.emplace(node, sources_of(node));
    }
}

ggml_cgraph * graph_parts::graph_of(const std::vector<ggml_tensor *> & nodes) {
    const std::set<ggml_tensor *> own(nodes.begin(), nodes.end());
    std::set<ggml_tensor *> others;
    for (const ggml_tensor * node : nodes) {
        for (ggml_tensor * source : node->src) {
            if (source && own.count(source) == 0) {
                others.insert(source);
            }
        }
    }
    for (ggml_tensor * other : others) {
        if (other->op != GGML_OP_NONE) {
            ggml_set_output(other); // a device may leave out what only one node of its part uses
        }
    }
    const size_t n = std::max(nodes.size(), others.size());
    contexts_.push_back(new_ggml_context(ggml_graph_overhead_custom(n, false)));
    ggml_cgraph * graph = ggml_new_graph_custom(contexts_.back().get(), n, false);
    const as_leafs hidden(others);
    for (ggml_tensor * node : nodes) {
        ggml_build_forward_expand(graph, node);
    }
    return graph;
}

void graph_parts::cut(ggml_backend_sched_t sched) {
    std::vector<std::vector<ggml_tensor *>> nodes;
    const std::vector<graph_turn> & turns = graph_.turns();
    std::set<ggml_tensor *> copied;
    size_t next = 0;                  // turn
    size_t first = 0;                 // part since the device changed
    ggml_backend_t current = nullptr; // of the node before
    bool is_turn = !turns.empty() && !turns.front().after;
    for (int i = 0; i < ggml_graph_n_nodes(graph_.graph()); ++i) {
        ggml_tensor * node = ggml_graph_node(graph_.graph(), i);
        ggml_backend_t backend = is_view(node) ? nullptr : ggml_backend_sched_get_tensor_backend(sched, node);
        const bool is_elsewhere = backend && current && backend != current;
        if (parts_.empty() || is_turn || is_elsewhere) {
            first = is_elsewhere ? parts_.size() : first;
            parts_.push_back({nullptr, nullptr, is_turn ? std::make_optional(next++) : std::nullopt, {}});
            nodes.emplace_back();
        }
        current = backend ? backend : current;
        parts_.back().backend = backend ? backend : parts_.back().backend;
        nodes.back().push_back(node);
        const std::vector<ggml_tensor *> & before = sources_.at(node);
        for (size_t j = 0; j < GGML_MAX_SRC; ++j) {
            if (node->src[j] != before[j] && copied.insert(node->src[j]).second) {
                parts_[first].copied.emplace_back(before[j], node->src[j]);
            }
        }
        is_turn = next < turns.size() && turns[next].after == node;
    }
    for (size_t i = 0; i < parts_.size(); ++i) {
        parts_[i].graph = graph_of(nodes[i]);
    }
}

} // namespace kvg
