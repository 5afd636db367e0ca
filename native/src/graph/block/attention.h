// Token mixing by attention over cells.
#pragma once

#include "graph/attention.h"
#include "graph/block/norm.h"
#include "graph/builder.h"
#include "memory/kv_group.h"
#include "memory/working_rows.h"
#include "model/weights.h"

namespace kvg {

// What differs from group to group.
struct group_inputs {
    ggml_tensor * slots; // I64 (n_tokens): the cell of each token; nullptr for a group without layers
    ggml_tensor * mask;  // F16 (n_kv, n_tokens); nullptr when no layer of the group attends: the last one, without outputs
};

// What attention reads in place of a layer's K and V: the nodes of a graph that write to them. (width, n_rows) each; v is k where V is a
// part of K
struct stored_rows {
    ggml_tensor * k;
    ggml_tensor * v;
};

// A layer's attention in a graph.
struct attention_block {
    const model & of;
    uint32_t layer;
    const kv_group & cells;
    const layer_attention & how;
    cell_span span;             // that is attended
    ggml_tensor * positions;    // I32 (n_tokens)
    ggml_tensor * temperatures; // F32 (1, 1, n_tokens): what queries are multiplied by; nullptr: nothing
    group_inputs in;
    const row_turn * turn; // at a device's working rows; nullptr: cells are written where they lie
    bool attends;          // false: only the cells matter, in the last layer that has any, of a batch that asks for no output
    stored_rows & rows;    // of the layer that owns K and V; that layer sets them. Not used by an assistant's layers

    // Writes K and V of the new tokens into their cells, if the layer has its own, then attends over the span. x (n_embd, n_tokens).
    // Returns (n_head * head_dim_v, n_tokens), or nullptr when it doesn't attend.
    ggml_tensor * build(builder & b, ggml_tensor * x) const;

private:
    // What Q, K and V are made of.
    struct input {
        ggml_tensor * normed; // (n_embd, n_tokens)
        ggml_tensor * qkv;    // its product with a matrix of all three; nullptr: each has its own
    };

    input query_input(builder & b, const input & x) const;
    // Q, K or V as heads: (head_dim, n_head, n_tokens)
    ggml_tensor * heads_of(builder & b, const input & x, role weight) const;
    // (head_dim, n_head_kv, n_tokens) each
    struct k_and_v {
        ggml_tensor * k;
        ggml_tensor * v;
    };

    k_and_v made_of(builder & b, const input & x) const;
    k_and_v of_latent(builder & b, ggml_tensor * x) const;
    ggml_tensor * latent_k(builder & b, ggml_tensor * x) const;
    // What heads give, (n_head * head_dim_v, n_tokens), behind a gate that a matrix of its own makes of x.
    ggml_tensor * behind_gate(builder & b, ggml_tensor * heads, ggml_tensor * x) const;
    ggml_tensor * latent_q(builder & b, ggml_tensor * q) const;
    ggml_tensor * out_of_latents(builder & b, ggml_tensor * heads) const;
    ggml_tensor * normed(builder & b, ggml_tensor * heads, role norm_weight) const;
    ggml_tensor * rotated(builder & b, ggml_tensor * heads) const;
    // K or Q with their norms, rotated by the positions.
    ggml_tensor * placed(builder & b, ggml_tensor * heads, role norm_weight) const;
    ggml_tensor * normed_last(builder & b, ggml_tensor * heads, role norm_weight) const;
    // K and V of the new tokens, written into their cells.
    stored_rows store(builder & b, const input & x) const;
};

} // namespace kvg
