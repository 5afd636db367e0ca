// All that graphs and cache know of a layer, read once from a file's metadata. No two layers need be alike.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

namespace kvg {

// How a layer's queries and K are rotated by their positions.
struct rope_params {
    int mode;          // GGML_ROPE_TYPE_*
    int n_rot;         // rotated dimensions, <= head_dim_k; 0: none, positions leave K as it is
    int n_ctx_orig;    // context length before any scaling
    float freq_base;   //
    float freq_scale;  // position multiplier: 1 / scaling factor
    float yarn;        // how much of YaRN's ramp between scaled and unscaled frequencies is used; 0: all are scaled alike
    float attn_factor; // what rotated dimensions are multiplied by, beside what YaRN does
    bool with_factors; // each pair's frequency is divided by the model's rope factors, where it has them

    bool operator==(const rope_params & o) const {
        const auto all = [](const rope_params & r) {
            return std::tie(r.mode, r.n_rot, r.n_ctx_orig, r.freq_base, r.freq_scale, r.yarn, r.attn_factor, r.with_factors);
        };
        return all(*this) == all(o);
    }
};

enum class norm_kind {
    rms,
};

// How a token learns of others.
enum class mixing_kind {
    attention,
};

enum class activation_kind {
    swiglu,     // silu(gate) * up
    geglu,      // gelu(gate) * up
    swiglu_oai, // gpt-oss: both are clamped, and up gets 1 added
};

// How a router's numbers become the weights of the experts that it chose.
enum class gating_kind {
    softmax,           // of all experts, then those of the chosen are divided by their sum
    softmax_of_chosen, // of the chosen only
};

// What a layer does with each token by itself.
struct feed_forward_spec {
    activation_kind activation;
    uint32_t n_ff;          // 0 where there are experts
    uint32_t n_expert;      // 0: no experts
    uint32_t n_expert_used; // for each token
    uint32_t n_ff_expert;
    gating_kind gating;
};

struct layer_spec {
    uint32_t group;   // of cells: an index into hparams::groups
    uint32_t kv_from; // the layer whose K and V it reads: its own number, or that of an earlier layer, which then owns them
    uint32_t n_head;
    uint32_t n_head_kv;
    uint32_t head_dim_k; // also of queries
    uint32_t head_dim_v;
    uint32_t window; // positions that a token attends to, its own included; 0: all
    rope_params rope;
    float scale;    // of the products of queries and K
    float soft_cap; // scores become soft_cap * tanh(score / soft_cap); 0: none
    bool norm_v;    // heads of V are normalized
    bool sinks;     // one more score for each query head takes its share of the weights, and has no V
    feed_forward_spec feed_forward;

    uint32_t q_width() const { return n_head * head_dim_k; }
    uint32_t k_width() const { return n_head_kv * head_dim_k; }
    uint32_t v_width() const { return n_head_kv * head_dim_v; }
    uint32_t out_width() const { return n_head * head_dim_v; } // of what attention gives
};

// The layers that share cells: their window and their rows of K and V are alike.
struct group_spec {
    uint32_t window;
    uint32_t n_head_kv;
    uint32_t head_dim_k;
    uint32_t head_dim_v;
    std::vector<uint32_t> layers; // rising; those that have K and V of their own

    uint32_t k_width() const { return n_head_kv * head_dim_k; }
    uint32_t v_width() const { return n_head_kv * head_dim_v; }
};

// Groups in the order of their first layers, those without a window first; sets each layer's `group`. A layer without K and V of its own
// has the group of the layer that it reads from.
std::vector<group_spec> make_groups(std::vector<layer_spec> & layers);

} // namespace kvg
