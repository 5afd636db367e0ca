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
    float freq_scale;  // position multiplier: 1 / linear scaling factor
    bool with_factors; // each pair's frequency is divided by the model's rope_freqs, where it has them

    bool operator==(const rope_params & o) const {
        return std::tie(mode, n_rot, n_ctx_orig, freq_base, freq_scale, with_factors) ==
               std::tie(o.mode, o.n_rot, o.n_ctx_orig, o.freq_base, o.freq_scale, o.with_factors);
    }
};

enum class norm_kind {
    rms,
};

// How a token learns of others.
enum class mixing_kind {
    attention,
};

enum class feed_forward_kind {
    swiglu, // down(silu(gate(x)) * up(x))
};

struct layer_spec {
    uint32_t group; // of cells: an index into hparams::groups
    uint32_t n_head;
    uint32_t n_head_kv;
    uint32_t head_dim_k; // also of queries
    uint32_t head_dim_v;
    uint32_t window; // positions that a token attends to, its own included; 0: all
    rope_params rope;
    float scale;    // of the products of queries and K
    float soft_cap; // scores become soft_cap * tanh(score / soft_cap); 0: none
    bool sinks;     // one more score for each query head takes its share of the weights, and has no V
    feed_forward_kind feed_forward;
    uint32_t n_ff;

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
    std::vector<uint32_t> layers; // rising

    // The lowest position that a token sees.
    int32_t first_seen(int32_t pos) const {
        return window == 0 || static_cast<uint32_t>(pos) < window ? 0 : pos - static_cast<int32_t>(window) + 1;
    }

    uint32_t k_width() const { return n_head_kv * head_dim_k; }
    uint32_t v_width() const { return n_head_kv * head_dim_v; }
};

// Groups in the order of their first layers, those without a window first; sets each layer's `group`.
std::vector<group_spec> make_groups(std::vector<layer_spec> & layers);

} // namespace kvg
