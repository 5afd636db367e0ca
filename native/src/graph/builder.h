// Builds a graph from blocks. It gives them room for tensors, remembers the device that each operation should run on, and makes a graph of
// the size that is needed.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <ggml-cpp.h>

#include "cpu/products.h"
#include "model/adapter.h"
#include "model/layer_spec.h"

namespace kvg {

// t, with a name as in "attention-3" for layer 3.
inline ggml_tensor * named(ggml_tensor * t, const char * name, uint32_t layer) {
    return ggml_format_name(t, "%s-%u", name, layer);
}

// A product, called as its weight is, without ".weight".
ggml_tensor * called_as(ggml_tensor * product, const ggml_tensor * weight);

class builder {
public:
    // adapters: what they add to products is added here; they must outlive it
    explicit builder(const std::vector<active_adapter> & adapters) : adapters_(adapters) {}
    // A context with room for the tensors of one operation, at most MAX_OPERATION. Call it again for the next operation.
    // error(KVG_INTERNAL) when more tensors were made since the last call
    ggml_context * ctx();
    static constexpr size_t MAX_OPERATION = 32;

    // Names are for ggml's own tools, which print numbers for nodes without one (GGML_SCHED_DEBUG=2).
    ggml_tensor * input(const char * name, ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2 = 1);
    // weight * x; both are matrices. The product is called as the weight is, without ".weight".
    ggml_tensor * product(ggml_tensor * x, ggml_tensor * weight) { return linear(x, weight, nullptr, nullptr); }
    // Each of x's matrices times one of the weight's: (n_out, n_rows, n). x (n_in, n_rows, n), weight (n_in, n_out, n)
    ggml_tensor * product_of_each(ggml_tensor * x, ggml_tensor * weight) { return called_as(plain_product(x, weight), weight); }
    // From now on these weights' products with x are computed together where kernels of ours can: their threads wait for each other once.
    // weights: to be multiplied with x; any may be nullptr
    void together(ggml_tensor * x, std::initializer_list<ggml_tensor *> weights);
    // weight * x, times the scale and plus the bias if these aren't nullptr
    ggml_tensor * linear(ggml_tensor * x, ggml_tensor * weight, ggml_tensor * scale, ggml_tensor * bias);
    // y, a product of x with this weight, and what adapters add to it. ids: the experts of each token; nullptr: there are none
    ggml_tensor * adapted(ggml_tensor * y, ggml_tensor * x, const ggml_tensor * weight, ggml_tensor * ids = nullptr);
    // made + x, where nothing else reads what was made: a product of our kernels adds x itself.
    ggml_tensor * sum(ggml_tensor * made, ggml_tensor * x);
    // Each token's products with the matrices of its experts, times these experts' scales if there are any: (n_out, n_expert_used,
    // n_tokens). x (n_in, n_expert_used or 1, n_tokens), scale (n_expert), experts I32 (n_expert_used, n_tokens)
    ggml_tensor * experts(ggml_tensor * x, ggml_tensor * weight, ggml_tensor * scale, ggml_tensor * experts);
    // The order of pairs of tokens and experts (graph/expert_product.h).
    ggml_tensor * order_of(ggml_tensor * experts, int64_t n_expert);
    // The cosines and sines for these positions (graph/roped.h), which layers share that rotate alike.
    ggml_tensor * rope_table_of(ggml_tensor * positions, ggml_tensor * freq_factors, const rope_params & params);
    // Whether an adapter adds to products with this weight.
    bool adapts(const ggml_tensor * weight) const;
    // Rows of the embeddings of tokens, (n_embd, n_tokens).
    ggml_tensor * embeddings(ggml_tensor * weight, ggml_tensor * tokens);
    // The graph computes this tensor, after the roots that were added before.
    void root(ggml_tensor * t) { roots_.push_back(t); }
    // Operations made since the last call of wish() should run on this device.
    void wish(ggml_backend_dev_t device);

    // Each operation and its device, in the order in which operations were made; after finish() those of the graph.
    const std::vector<std::pair<ggml_tensor *, ggml_backend_dev_t>> & wishes() const { return wishes_; }
    // The graph of all roots; it lives as long as the builder. Nothing can be made after that. error(KVG_INTERNAL) as ctx(), and where a
    // tensor was marked as an output after a product was made that computes it by itself
    ggml_cgraph * finish();

private:
    struct chunk {
        std::unique_ptr<uint8_t[]> arena; // ggml would abort where this throws
        ggml_context_ptr ctx;
        ggml_tensor * last_wished;
    };
    struct known_table {
        ggml_tensor * positions;
        ggml_tensor * freq_factors;
        const rope_params * params;
        ggml_tensor * table;
    };
    void open(size_t n_bytes);
    void require_room_kept() const;
    void require_outputs_known() const;
    void forget_unused(ggml_cgraph * graph);
    ggml_tensor * rounded_for(ggml_tensor * x, const row_form & form);
    ggml_tensor * plain_product(ggml_tensor * x, ggml_tensor * weight);
    ggml_tensor * plain_experts(ggml_tensor * x, ggml_tensor * weight, ggml_tensor * experts);

    const std::vector<active_adapter> & adapters_;
    std::vector<chunk> chunks_;
    std::map<std::pair<ggml_tensor *, const row_form *>, ggml_tensor *>
        rounded_; // what products round: Q, K and V have one input
    std::map<std::pair<ggml_tensor *, ggml_tensor *>, ggml_tensor *> products_; // of x and weights, computed together
    std::vector<ggml_tensor *> folded_; // that nodes compute by themselves, which read them
    std::vector<known_table> rope_tables_;
    std::map<ggml_tensor *, ggml_tensor *> orders_; // of experts
    size_t n_used_ = 0;                             // bytes of the last chunk at the last call of ctx()
    size_t first_unwished_ = 0;                     // of the chunks
    std::vector<ggml_tensor *> roots_;
    std::vector<std::pair<ggml_tensor *, ggml_backend_dev_t>> wishes_;
};

} // namespace kvg
