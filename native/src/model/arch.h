// The table: architecture name -> what its tensors are called and how its layers are built.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <ggml.h>

#include "model/hparams.h"
#include "model/layer_spec.h"
#include "model/metadata.h"

namespace kvg {

// What a tensor is for. Shapes in ggml's order, innermost first.
enum class role {
    // of the model
    token_embd,  // (n_embd, n_vocab)
    output_norm, // (n_embd)
    output_norm_bias,
    output, // (n_embd, n_vocab); token_embd when they are tied
    output_bias,
    position_embd,  // (n_embd, n_ctx_train): of each position, added to the embeddings of tokens
    type_embd,      // (n_embd, n_token_types), so too
    embd_norm,      // (n_embd): of all that the layers begin with
    embd_norm_bias, //
    dense_in,       // (n_embd, n_dense): what an encoder's states go through behind their norm
    dense_out,      // (n_dense, n_embd)
    class_hidden,   // (n_embd, n_embd): of a classifier, which scores texts by what their states were pooled into
    class_hidden_bias,
    class_norm, // (n_embd): of what comes of it
    class_out,  // (n_embd, n_classes)
    class_out_bias,
    layer_embd,      // (n_embd_layer * n_layer, n_vocab): what layers have of their own for each token, layer after layer
    layer_embd_proj, // (n_embd, n_embd_layer * n_layer)
    layer_embd_norm, // (n_embd_layer)
    altup_in,        // (n_embd, n_embd, n_altup - 1): what makes a token's other states of its embedding
    altup_out,       // so too: what makes one of them again
    draft_out,       // (n_embd, n_embd_target): of an assistant: what makes a state of its target
    // of a layer: attention
    attn_norm, // (n_embd)
    attn_norm_bias,
    mix_norm, // (n_embd): of what attention sees, where attn_norm is of what the feed-forward beside it sees
    mix_norm_bias,
    wqkv, // the next three, one after the other
    wq,   // (n_embd, n_head * head_dim_k)
    wk,   // (n_embd, n_head_kv * head_dim_k)
    wv,   // (n_embd, n_head_kv * head_dim_v)
    wo,   // (n_head * head_dim_v, n_embd)
    wqkv_bias,
    wq_bias,
    wk_bias,
    wv_bias,
    wo_bias,
    q_norm, // (head_dim_k): of each head, (head_dim_k, n_head): so too, or (n_head * head_dim_k): of all
    k_norm,
    q_norm_bias,
    k_norm_bias,
    // and attention by a latent (latent_spec)
    q_down,         // (n_embd, q_rank): queries by way of a smaller width
    q_down_norm,    // (q_rank)
    latent_down,    // (n_embd, head_dim_k): the latent, and what lies behind it
    latent_norm,    // (rank): of the latent
    latent_k,       // (head_dim - n_behind, rank, n_head): a head's query becomes one of latents
    latent_v,       // (rank, head_dim_out, n_head): what a head gathers of latents becomes its V
    latent_up,      // (kv_rank, n_head * (head_dim_k - n_rot + head_dim_v)): K and V of heads, made of a latent
    sinks,          // (n_head)
    attn_gate,      // (n_embd, n_gate): of what attention gives
    attn_sub_norm,  // (n_head * head_dim_v): of what attention gives
    linear,         // (n_embd, n_embd): all that a layer does in place of attention
    attn_post_norm, // (n_embd): of what attention adds
    attn_sum_norm,  // (n_embd): of what it was added to
    attn_sum_norm_bias,
    attn_sum_norm_2, // (n_embd): of that with what attention saw added once more
    attn_sum_norm_2_bias,
    // of a layer: a state that recurs
    state_in,         // (n_embd, n): what the convolution and the recurrence take, one after the other
    state_q,          // (n_embd, n): where these three have a matrix each
    state_k,          //
    state_v,          //
    state_gate,       // (n_embd, v_width): of the results
    state_in_gated,   // the two in one, by heads of K
    taps,             // (n_taps, n_channels): of the convolution
    taps_q,           // (n_taps, 1, n): where Q, K and V have theirs each
    taps_k,           //
    taps_v,           //
    taps_bias,        // (n_channels)
    state_beta,       // (n_embd, n_head)
    state_alpha,      // (n_embd, n_head): the time step, before dt_bias
    state_beta_alpha, // the two, by heads of K
    dt_bias,          // (n_head)
    decay_down,       // (n_embd, head_dim_k): the time step of each dimension of K, by way of a smaller width
    decay_up,         // (head_dim_k, n_head * head_dim_k)
    gate_down,        // (n_embd, head_dim_v): the gate of the results, so too
    gate_up,          // (head_dim_v, v_width)
    state_decay,      // (n_head): what the time step is multiplied by
    state_skip,       // (n_head): Mamba-2's share of V in the results
    state_norm,       // of the results
    state_out,        // (v_width, n_embd)
    // and its feed-forward
    ffn_norm, // (n_embd)
    ffn_norm_bias,
    ffn_gate_up, // the next two, one after the other
    ffn_gate,    // (n_embd, n_ff)
    ffn_up,
    ffn_down,     // (n_ff, n_embd)
    ffn_sub_norm, // (n_ff): of what it sees
    ffn_gate_up_bias,
    ffn_gate_bias,
    ffn_up_bias,
    ffn_down_bias,
    router,       // (n_embd, n_expert)
    router_scale, // (n_embd): of what it sees
    router_bias,
    expert_gate_up, // the next two, one after the other
    expert_gate,    // (n_embd, n_ff_expert, n_expert)
    expert_up,
    expert_down,        // (n_ff_expert, n_embd, n_expert)
    expert_choice_bias, // (n_expert): of the router's numbers when experts are chosen
    expert_latent_down, // (n_embd, n_latent): what experts see
    expert_latent_up,   // (n_latent, n_embd): what is made of what they give
    shared_router,      // (n_embd): of the expert that every token goes to
    shared_gate_up,     // the next two, one after the other
    shared_gate,        // (n_embd, n_ff_shared)
    shared_up,          //
    shared_down,        // (n_ff_shared, n_embd)
    expert_gate_bias,
    expert_up_bias,
    expert_down_bias,
    dense_post_norm,  // (n_embd): of a dense feed-forward beside experts
    expert_norm,      // and of the experts, before and after
    expert_post_norm, //
    ffn_post_norm,    // (n_embd): of what it adds
    ffn_sum_norm,     // (n_embd): of what it was added to
    ffn_sum_norm_bias,
    // and what it has of its own for each token
    embd_gate,      // (n_embd, n_embd_layer)
    embd_proj,      // (n_embd_layer, n_embd)
    embd_post_norm, // (n_embd)
    // several states for each token (AltUp), and a smaller width beside attention (Laurel)
    altup_router,           // (n_embd, n_altup)
    altup_router_norm,      // (n_embd)
    altup_guess,            // (n_altup, n_altup * n_altup)
    altup_correction,       // (n_altup, n_altup)
    altup_correction_scale, // (n_embd)
    laurel_down,            // (n_embd, laurel_rank)
    laurel_up,              // (laurel_rank, n_embd)
    laurel_norm,            // (n_embd)
    layer_scale,            // (1): of all that the layer returns
    // of a draft head
    draft_in,         // (2 n_embd, n_embd): what it begins with, of the token's embedding and the hidden state before it; an
                      // assistant has it in its frame, (2 n_embd_target, n_embd)
    draft_embd_norm,  // (n_embd): of the embedding
    draft_state_norm, // (n_embd): of the hidden state
    draft_embd,       // (n_embd, n_vocab): embeddings of its own
    draft_norm,       // (n_embd): of what it ends with, in place of the model's
    draft_output,     // (n_embd, n_vocab): an output of its own
    count
};

// Tensors by role; nullptr for those that there are not.
class role_tensors {
public:
    ggml_tensor * operator[](role r) const { return tensors_[static_cast<size_t>(r)]; }
    ggml_tensor *& operator[](role r) { return tensors_[static_cast<size_t>(r)]; }
    // What products with this matrix are multiplied by: one number, or one for each expert. nullptr: nothing
    ggml_tensor * scale(role r) const { return scales_[static_cast<size_t>(r)]; }
    ggml_tensor *& scale(role r) { return scales_[static_cast<size_t>(r)]; }

private:
    std::array<ggml_tensor *, static_cast<size_t>(role::count)> tensors_ = {};
    std::array<ggml_tensor *, static_cast<size_t>(role::count)> scales_ = {};
};

// A width that a tensor's dimension takes from the hparams.
enum class extent {
    one,
    embd,
    embd_twice,
    target_embd,
    target_embd_twice,
    vocab,
    positions, // that the model was trained for
    token_types,
    dense, // between the two matrices behind an encoder
    classes,
    heads,
    heads_kv,
    head_k, // of one head
    q,
    k,
    v,
    qkv,
    out, // of what attention gives
    ff,
    gate_up, // twice that
    expert,
    expert_ff,
    expert_gate_up, // twice that
    expert_in,      // what experts see
    shared_ff,
    shared_gate_up, // twice that
    pairs,          // of rope's dimensions
    state_in,       // what a state's layer takes
    state_in_gated, // and its gate
    taps,
    channels,
    state_heads,
    state_heads_twice,
    state_dim_v, // of one head
    state_v,     // of all
    state_dim_k,
    state_k,     // of all
    state_group, // of one group of heads
    state_groups,
    embd_layer,
    embd_layers, // of all layers
    altup,
    altup_squared,
    altup_others, // all but one
    laurel,
    latent_rank,
    q_rank,
    latent_plain, // what of a head's query meets the latent
    latent_out,   // of a head
    kv_rank,
    kv_rank_rotated, // a latent, and what lies behind it
    kv_of_latent,    // K without its rotated dimensions, and V
    attn_gate,
};

enum class presence {
    required,
    optional,
    unless_fused, // required unless the matrix is there that holds it together with others
    unless_older, // required unless the file has the older form instead
    older,        // takes part where the newer tensors are missing
    ignored,      // files have it, and it takes no part in what the model computes
};

// Which layers have a tensor.
enum class with {
    any,
    attention, // those that attend
    linear,    // that have a matrix in its place
    q_plain,   // those whose queries are made by one matrix, and those where two do
    q_latent,
    state,         // that have a state
    dense,         // those with a feed-forward of their own
    dense_apart,   // of these, those with gate and up in two matrices, or with up alone
    dense_in_one,  // and those with both in one
    experts,       // with experts
    experts_alone, // of these, those that don't attend
    shared_expert,
    own_kv,     // with K and V of their own
    shared_kv,  // without
    draft_head, // that guess tokens ahead
    layer_embd, // where the model has something of each layer's own for each token; for tensors of the model, too
};

// A matrix may have a `.scale` beside its `.weight`, which its products are multiplied by.
enum class scale {
    none,
    applied,
    ignored, // the file has it, and libllama's products aren't multiplied by it
};

struct tensor_spec {
    const char * name; // of a layer: what follows blk.<layer>.
    kvg::role role;
    std::array<extent, 3> shape; // vectors must be F32
    kvg::presence presence;
    with layers = with::any;
    kvg::scale scale = scale::none;
};

struct arch_recipe {
    const char * name = "";
    int rope_mode = 0; // GGML_ROPE_TYPE_*
    norm_kind norm = norm_kind::rms;
    bool norm_by_key = false; // its norms are RMS norms where a file has an epsilon for them
    activation_kind activation = activation_kind::swiglu;
    gating_kind gating = gating_kind::softmax;
    enum {
        none,
        allowed,
        always,
        beside // some layers may have them, beside a dense feed-forward
    } experts = none;
    kvg::rope_factors rope_factors = kvg::rope_factors::none;
    bool partial_rope = false;     // rope may rotate a part of each head
    bool scaled_embedding = false; // embeddings are multiplied by the root of their width
    std::vector<tensor_spec> frame;
    std::vector<tensor_spec> layer;
    // What else its files say of layers and frame, when the common keys have been read; nullptr: nothing
    void (*read)(const metadata & in, hparams & h) = nullptr;
    // Which layers have KV heads; `read` says what others do instead.
    enum {
        all,
        some,
        no_layer
    } attending = all;
    // layers may only feed forward
    bool may_only_feed = false;
    // files may have a draft head behind the layers, which is one more layer that attends
    bool has_draft_head = false;
    // it is an assistant, which drafts for another model by that one's states and cells
    bool assists = false;
};

// error(KVG_UNSUPPORTED) with the names there are
const arch_recipe & find_arch(const std::string & name);

// layer: nullptr for the frame's extents
int64_t width(extent e, const hparams & h, const layer_spec * layer);

} // namespace kvg
