// What the graphs need to know of a model, read from its metadata.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/gguf_file.h"
#include "model/layer_spec.h"

namespace kvg {

// What divides the frequencies of rope, for each pair of dimensions.
enum class rope_factors {
    none,
    of_model,  // one set
    by_length, // LongRoPE: a set for contexts up to the original length, another for longer ones
};

// Queries at later positions are multiplied by more: 1 + scale * log(1 + floor((position + offset) / length)). scale 0: by nothing
struct temperature_spec {
    float scale;
    float length;
    float offset;
};

enum class classifier_end {
    none,
    tanh,
    softmax,
};

// What makes scores of what a text's states were pooled into.
struct classifier_spec {
    uint32_t n_classes; // 0: there is none
    bool of_mean;       // of a text's states; false: of one state, an encoder's first and another's last
    bool gelu;          // between its two matrices, in place of tanh
    classifier_end end; // what scores go through
};

struct hparams {
    std::string arch;
    uint32_t n_embd;
    uint32_t n_vocab;
    uint32_t n_ctx_train;
    norm_kind norm;
    float norm_eps;
    float post_norm_eps; // of norms of what layers add
    bool bare_norms;     // norms of layers, and the last one, have no weights
    bool embd_normed;    // embeddings go through a norm without weights
    bool encodes; // a text is computed as a whole: every token sees those behind it. It gives hidden states and no logits
    uint32_t n_token_types; // of which a token's is the first; each has an embedding. 0: there are none
    uint32_t n_dense;       // between the two matrices that an encoder's states go through; 0: there are none
    classifier_spec classifier;
    bool learned_positions; // each of the n_ctx_train positions has an embedding, and there are no others
    uint32_t n_embd_layer;  // of what each layer has of its own for each token of the vocabulary; 0: nothing
    uint32_t n_altup;       // hidden states of each token; 0: there is one, and no AltUp
    uint32_t laurel_rank;   // of what is added beside attention
    float embedding_scale;  // what embeddings are multiplied by
    float residual_scale;   // what layers add is multiplied by it
    float logit_scale;      // of the logits
    float final_soft_cap;   // logits become cap * tanh(logit / cap); 0: none
    temperature_spec temperature;
    kvg::rope_factors rope_factors;
    std::vector<layer_spec> layers;
    uint32_t n_draft_heads; // of the layers the last ones are draft heads; 0: there are none, or they aren't wanted
    bool has_draft_head;    // the file has one, be it wanted or not
    uint32_t n_embd_target; // an assistant (model/assistant.h): the width of its target's states; 0: it is none
    norm_kind draft_norm;   // what a draft head ends with, where it has a norm of its own
    float draft_norm_eps;
    std::vector<group_spec> groups; // of cells
    layer_span here;                // the others are `elsewhere` (model/stage.h)

    // Whether the graph begins with tokens, and ends with an output.
    bool is_first() const { return here.begin == 0; }
    bool is_last() const { return here.end == n_layer(); }
    bool is_whole() const { return is_first() && is_last(); }
    bool gives_logits() const { return is_last() && !encodes; }
    uint32_t n_layer() const { return static_cast<uint32_t>(layers.size()); }
    // A draft head guesses the token after the next one; what the others say is not made by it.
    bool is_draft_head(uint32_t layer) const { return layer >= n_layer() - n_draft_heads; }
    // The last layer with K and V, or a state, of its own: where only these matter, nothing after it does.
    uint32_t last_owner() const;
    // Whether any layer's attention tells distances by the positions of cells (ALiBi).
    bool tells_distances() const;
    // floats of one sequence's state: of all layers, one after the other
    uint64_t state_floats() const;
};

// draft_heads: whether draft heads are wanted. error(KVG_MODEL_LOAD) for missing or impossible values, error(KVG_UNSUPPORTED) for what no
// recipe here can run, also where a draft head is wanted and there is none.
hparams read_hparams(const gguf_file & file, bool draft_heads = false);

} // namespace kvg
