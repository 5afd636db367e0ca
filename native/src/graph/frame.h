// The whole graph of a micro-batch: inputs, embedding, layers, output.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ggml-cpp.h>

#include "graph/block/attention.h"
#include "graph/builder.h"
#include "graph/recur.h"
#include "graph/recur_ggml.h"
#include "graph/state_segments.h"
#include "memory/kv_cache.h"
#include "model/weights.h"

namespace kvg {

// All that a graph's topology depends on.
struct decode_shape {
    uint32_t n_tokens;
    uint32_t n_outputs;
    std::vector<cell_span> spans;          // that are attended, of each group
    std::vector<state_group> state_groups; // of states on devices; empty: there are none
    bool in_order;                         // tokens are in the order of these
    bool drafts = false; // of the draft head or the assistant alone, which guess what follows each of the tokens

    bool operator==(const decode_shape & o) const {
        return n_tokens == o.n_tokens && n_outputs == o.n_outputs && spans == o.spans && state_groups == o.state_groups &&
               in_order == o.in_order && drafts == o.drafts;
    }
};

// A layer that attends over working rows, and may do so only once they are there.
struct graph_turn {
    uint32_t layer;
    bool attends;        // false: it only writes
    ggml_tensor * after; // the last operation before it; nullptr: it is the first layer
};

class decode_graph {
public:
    // model: the cache's; in a graph that drafts its assistant, where it has one. attentions, recurs: of each layer, nullptr where it has
    // no state or has it on a device; adapters: those that take part
    decode_graph(const model & model, const kv_cache & cache, const std::vector<layer_attention> & attentions,
                 const std::vector<recur_op *> & recurs, const std::vector<active_adapter> & adapters,
                 const decode_shape & shape);

    const decode_shape & shape() const { return shape_; }
    ggml_cgraph * graph() const { return graph_; }
    // Where each operation should run: with its layer's weights, or where attention is concerned with its cells. In the graph's order.
    const std::vector<std::pair<ggml_tensor *, ggml_backend_dev_t>> & wishes() const { return builder_.wishes(); }
    // in the order in which they are computed; none where all cells are read where they lie
    const std::vector<graph_turn> & turns() const { return turns_; }
    // Of each layer the nodes that write K and V; those of a layer come one after the other. nullptr: it has none of its own.
    const std::vector<stored_rows> & stored() const { return stored_; }
    // Whether products of ours (graph/product.h) are nearly all that the CPU has to do: then the team shares each of them, and ggml needs no
    // threads.
    bool is_for_team() const { return is_for_team_; }
    // The names of operations that should run on the device, and that it can't run: "ROPE, SOFT_MAX". The CPU does them.
    std::string refused_by(ggml_backend_dev_t device) const;

    // inputs
    ggml_tensor * tokens = nullptr; // I32 (n_tokens); nullptr where a stage before has them
    ggml_tensor * hidden =
        nullptr; // F32 (n_embd, n_tokens): what that stage has made of them; in a graph that drafts, and in one of
                 // a model with a draft head, states behind tokens that come before
    ggml_tensor * previous =
        nullptr; // I32 (n_tokens), with a draft head: where each token's state before it is: a column of `hidden`,
                 // or n_tokens and a token
    ggml_tensor * positions = nullptr;    // I32 (n_tokens); nullptr where nothing depends on them
    ggml_tensor * temperatures = nullptr; // F32 (1, 1, n_tokens); nullptr: none
    std::vector<group_inputs> groups;     // in the cache's order
    std::vector<state_inputs> states;     // of each group of the shape
    ggml_tensor * order = nullptr;   // I32 (n_tokens): tokens as these groups have them; nullptr: as the micro-batch has them
    ggml_tensor * places = nullptr;  // I32 (n_tokens): where each token of the micro-batch is in that order
    ggml_tensor * outputs = nullptr; // I32 (n_outputs): which tokens; nullptr: none, or (stages before the last) all
    // results, nullptr when there are no outputs
    ggml_tensor * normed = nullptr; // F32 (n_embd, n_tokens): behind the final norm, of all tokens; only with a draft head
    ggml_tensor * embd = nullptr;   // F32 (n_embd, n_outputs); of a stage with another one behind it: of its last layer
    ggml_tensor * logits = nullptr; // F32 (n_vocab, n_outputs); nullptr for such a stage and an encoder, too

private:
    bool gives(uint32_t layer) const;
    const row_turn * turn_of(uint32_t layer) const;
    ggml_tensor * attend(ggml_tensor * x, uint32_t layer);
    ggml_tensor * recall(ggml_tensor * x, uint32_t layer);
    ggml_tensor * mix(ggml_tensor * x, uint32_t layer);
    ggml_tensor * asked(ggml_tensor * x, uint32_t layer);
    ggml_tensor * add(ggml_tensor * x, ggml_tensor * added);
    ggml_tensor * layer(ggml_tensor * x, uint32_t il);
    ggml_tensor * layer_of_states(ggml_tensor * states, uint32_t il);
    bool computes(const layer_spec & layer) const;
    void add_token_inputs();
    void add_inputs();
    ggml_tensor * embedded();
    void add_logits(ggml_tensor * output, ggml_tensor * scale);
    ggml_tensor * draft_begin(ggml_tensor * before);
    void add_draft_cells();
    void add_draft();
    void add_assistant();
    void add_outputs(ggml_tensor * x);
    void build();
    bool has_few_products_of_ggml() const;

    const model & model_;
    const kv_cache & cache_;
    const std::vector<layer_attention> & attentions_;
    const std::vector<recur_op *> & recurs_;
    decode_shape shape_;
    std::vector<graph_turn> turns_;
    std::vector<stored_rows> stored_;          // of each layer that has K and V of its own
    ggml_tensor * layer_embeddings_ = nullptr; // what layers have of their own for the tokens; nullptr: nothing
    builder builder_;
    ggml_cgraph * graph_;
    bool is_for_team_;
};

} // namespace kvg
