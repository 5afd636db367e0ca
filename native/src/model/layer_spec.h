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
    int offset;        // of the first of them
    int n_ctx_orig;    // context length before any scaling
    float freq_base;   //
    float freq_scale;  // position multiplier: 1 / scaling factor
    float yarn;        // how much of YaRN's ramp between scaled and unscaled frequencies is used; 0: all are scaled alike
    float attn_factor; // what rotated dimensions are multiplied by, beside what YaRN does
    float ramp_fast;   // of YaRN: pairs that turn so often within the original context keep their frequency,
    float ramp_slow;   // those that turn so often are scaled
    bool with_factors; // each pair's frequency is divided by the model's rope factors, where it has them

    bool operator==(const rope_params & o) const {
        const auto all = [](const rope_params & r) {
            return std::tie(r.mode, r.n_rot, r.offset, r.n_ctx_orig, r.freq_base, r.freq_scale, r.yarn, r.attn_factor,
                            r.ramp_fast, r.ramp_slow, r.with_factors);
        };
        return all(*this) == all(o);
    }
};

enum class norm_kind {
    rms,
    layer, // the mean is taken away before
};

enum class activation_kind {
    swiglu,     // silu(gate) * up
    geglu,      // gelu(gate) * up
    swiglu_oai, // gpt-oss: both are clamped, and up gets 1 added
    reglu,      // max(gate, 0) * up
    relu_sqr,   // max(up, 0)^2, without a gate
    gelu,       // gelu(up), so too
    xielu,      // Apertus (xielu_params), so too
};

// xIELU (Huang and Schlag 2024): a parabola above 0, another curve below. Each layer has learned its own.
struct xielu_params {
    float alpha_n;
    float alpha_p;
    float beta;
    float eps;
};

// How a layer remembers what was before, in a state of fixed size.
enum class state_kind { // numbers: kvg_state's
    none,
    short_conv, // LFM2: the last inputs
    delta_net,  // gated delta net (cpu/recur.h), behind a short convolution
    mamba2,     // Mamba-2, so too
};

// Multi-head latent attention (DeepSeek-V2): K is one latent that all heads share, with some dimensions behind it, and V is the latent.
// Each head's matrices for K and V are applied to its query and to what it gathers instead.
struct latent_spec {
    uint32_t head_dim;     // of queries as the model makes them; 0: no latent
    uint32_t n_behind;     // of these, the last that meet what lies behind the latent
    uint32_t head_dim_out; // of V as the model means it
    uint32_t q_rank;       // of what queries are made of; 0: they are made of what K is made of
};

// A layer's state, for each sequence.
struct state_spec {
    state_kind kind;
    uint32_t n_taps;     // inputs that the convolution sees, the token's own included
    uint32_t n_channels; // that are convolved
    uint32_t n_head;     // of V; 0: there is only the convolution
    uint32_t n_head_k;   // of Q and K
    uint32_t head_dim_k; // also of Q
    uint32_t head_dim_v;
    bool decays_by_width; // each dimension of K decays by itself (Kimi delta attention)
    bool in_turn;         // head h of V has Q and K of head h % n_head_k, else of h / (n_head / n_head_k)

    uint32_t k_width() const { return n_head_k * head_dim_k; }
    uint32_t v_width() const { return n_head * head_dim_v; }
    // what one matrix makes of each token
    int64_t in_width() const {
        switch (kind) {
        case state_kind::none:
            return 0;
        case state_kind::short_conv:
            return 3 * int64_t{n_channels}; // two gates, and what is convolved
        case state_kind::delta_net:
            return n_channels;
        case state_kind::mamba2:
            return int64_t{v_width()} + n_channels + n_head; // a gate, what is convolved, the time step
        }
        return 0;
    }
    uint64_t conv_floats() const { return kind == state_kind::none ? 0 : uint64_t{n_taps - 1} * n_channels; }
    uint64_t floats() const { return conv_floats() + uint64_t{v_width()} * head_dim_k; }
};

// How a router's numbers become the weights of the experts that it chose.
enum class gating_kind {
    softmax,           // of all experts
    softmax_of_chosen, // of the chosen only
    sigmoid,           // each by itself
};

// A sum of weights is divided by; it is never less than the smallest normal F16.
constexpr float SMALLEST_SUM_OF_WEIGHTS = 6.103515625e-5f;

// What a layer does with each token by itself.
struct feed_forward_spec {
    activation_kind activation;
    xielu_params xielu;     // of activation_kind::xielu
    uint32_t n_ff;          // 0 where there are experts
    bool in_one;            // gate and up are one matrix; told only where a row's files may have them so or apart
    float gate_cutoff;      // only so many standard deviations above its mean does a gate count; 0: all of it does
    uint32_t n_expert;      // 0: no experts
    uint32_t n_expert_used; // for each token
    uint32_t n_ff_expert;
    uint32_t n_ff_shared; // of an expert that every token goes to, too; 0: none
    uint32_t n_latent;    // of what experts see, made of the token's state by a matrix; 0: they see that state
    uint32_t n_group;     // of experts: those of the n_group_used best may be chosen; 0: all may
    uint32_t n_group_used;
    gating_kind gating;
    bool weighs_input;  // experts see their input multiplied by their weight, and what they give isn't
    bool sums_to_1;     // the chosen experts' weights are divided by their sum
    bool routes_first;  // the router sees what the layer begins with
    bool experts_first; // experts see what the layer begins with; beside them is a dense feed-forward
    float expert_scale; // what the chosen experts' weights are multiplied by; 0: nothing
    float sum_scale;    // what experts and what is beside them give together is multiplied by; 0: nothing

    bool feeds() const { return n_ff > 0 || n_expert > 0; }
};

// Layers [begin, end): those of a stage, or all.
struct layer_span {
    uint32_t begin;
    uint32_t end;

    bool has(uint32_t layer) const { return begin <= layer && layer < end; }
    uint32_t n() const { return end - begin; }
};

constexpr uint32_t NO_GROUP = UINT32_MAX;

struct layer_spec {
    uint32_t group;   // of cells: an index into hparams::groups; NO_GROUP for a layer that doesn't attend
    uint32_t kv_from; // the layer whose K and V it reads: its own number, or that of an earlier layer, which then owns them
    uint32_t n_head;  // 0: the layer doesn't attend, and has no K and V
    uint32_t n_head_kv;
    uint32_t head_dim_k; // also of queries
    uint32_t head_dim_v;
    latent_spec latent;
    uint32_t
        kv_rank; // K and V of heads are made of a latent of this width, and K of dimensions that all heads share; 0: they are not
    bool gated;         // a part of Q's matrix makes a gate for what attention gives
    uint32_t n_gate;    // a matrix of its own makes the gate: a number for each head, or for all that heads give; 0: none
    bool gate_softplus; // the gate's numbers go through softplus, not through a sigmoid
    float out_scale;    // what attention adds is multiplied by it; 0: by nothing
    bool linear;        // one matrix in place of attention
    float clamp_qkv;    // Q, K and V are no further from 0; 0: they may be
    state_spec state;
    uint32_t window; // positions that a token attends to, its own included; 0: all
    bool chunked;    // of its own chunk: the first begins at 0, the next at `window`, and so on
    bool both_ways;  // of an encoder: it sees later positions, too; with a window, those at most half of it away
    rope_params rope;
    float scale; // of the products of queries and K
    float
        max_bias; // ALiBi (Press et al. 2021): scores of tokens further away are less, by so much in the first head; 0: they are not
    float soft_cap; // scores become soft_cap * tanh(score / soft_cap); 0: none
    bool norm_v;    // heads of V are normalized
    bool norm_last; // heads of queries and K are normalized behind rope, not before
    bool tempered;  // queries are multiplied by hparams::temperature
    bool parallel;  // the feed-forward sees what attention sees, not what it adds
    bool sinks;     // one more score for each query head takes its share of the weights, and has no V
    feed_forward_spec feed_forward;
    bool elsewhere; // it is of another stage: nothing of it is here
    bool of_target; // of an assistant: `group` and `kv_from` are those of the model that it drafts for

    bool has_attention() const { return n_head > 0; }
    bool has_state() const { return state.kind != state_kind::none; }
    // The same of what is here.
    bool attends() const { return has_attention() && !elsewhere; }
    bool recurs() const { return has_state() && !elsewhere; }
    uint64_t state_floats() const { return recurs() ? state.floats() : 0; }
    uint32_t q_width() const { return n_head * (latent.head_dim > 0 ? latent.head_dim : head_dim_k); }
    uint32_t q_rows() const {
        return q_width() * (gated ? 2 : 1);
    } // of Q's matrix: the gate's rows lie behind those of each head
    uint32_t k_width() const { return n_head_kv * head_dim_k; }
    uint32_t v_width() const { return n_head_kv * head_dim_v; }
    // of what is stored beside K, and of what is a part of it
    uint32_t stored_v() const { return latent.head_dim > 0 ? 0 : head_dim_v; }
    uint32_t v_in_k() const { return latent.head_dim > 0 ? head_dim_v : 0; }
    uint32_t out_width() const {
        return n_head * (latent.head_dim > 0 ? latent.head_dim_out : head_dim_v);
    } // of what attention gives
};

// The layers that share cells: their window and their rows of K and V are alike.
struct group_spec {
    uint32_t window;
    uint32_t n_head_kv;
    uint32_t head_dim_k;
    uint32_t head_dim_v; // 0: no V is stored
    uint32_t v_in_k;     // V is so many of K's dimensions, the first ones; 0: it is stored
    bool chunked;
    bool both_ways;
    std::vector<uint32_t> layers; // rising; those that have K and V of their own

    uint32_t k_width() const { return n_head_kv * head_dim_k; }
    uint32_t v_width() const { return n_head_kv * head_dim_v; }
};

// Groups in the order of their first layers, those without a window first; sets each layer's `group`. A layer without K and V of its own
// has the group of the layer that it reads from. Where no layer attends there is one group without layers: its cells have no K and V, and
// record the positions of sequences, so that every operation means what it means for other models.
std::vector<group_spec> make_groups(std::vector<layer_spec> & layers);

} // namespace kvg
