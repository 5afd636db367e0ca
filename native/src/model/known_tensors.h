// The tensors that a recipe knows: what a file is checked against, and the places for them.
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include <ggml-backend.h>

#include "model/arch.h"
#include "model/gguf_file.h"
#include "model/hparams.h"

namespace kvg {

// What divides rope's frequencies, F32 (n_rot / 2), on each device that rotates; empty: nothing does.
using device_factors = std::map<ggml_backend_dev_t, ggml_tensor *>;

struct model_weights {
    role_tensors frame;
    std::vector<role_tensors> layers;
    device_factors rope_freqs;    // for contexts of all lengths
    device_factors factors_short; // or for contexts up to the original length
    device_factors factors_long;  // and for longer ones
};

constexpr uint32_t FRAME = UINT32_MAX; // in place of a layer's number

// A tensor that the recipe knows. Where it goes: rope factors if it has any, else by its role, unless it is ignored.
struct known_tensor {
    std::string name;
    std::array<int64_t, 3> shape;
    kvg::presence presence;
    kvg::role role;
    bool is_scale;
    uint32_t layer;
    device_factors model_weights::* factors;
    bool is_vector;

    ggml_tensor *& in(model_weights & weights) const {
        role_tensors & all = layer == FRAME ? weights.frame : weights.layers[layer];
        return is_scale ? all.scale(role) : all[role];
    }
};

std::vector<known_tensor> known_tensors(const hparams & h);
// Whether a stage has it. Embeddings of tokens that are tied to the output are the last one's, too.
bool is_here(const known_tensor & known, const hparams & h, const gguf_file & file);
// Whether the output is made by the embeddings of tokens.
bool is_tied(const hparams & h, const gguf_file & file);
// Biases of experts, and what states take as they are, may look like a matrix, and ggml multiplies nothing by them.
bool is_multiplied(role r);
// A matrix for each head or state, which no layout made for experts serves.
bool is_of_heads(role r);
// Of a classifier: ggml's own product on the CPU multiplies by it, once for each text.
bool is_of_classifier(role r);
// Embeddings beside those of tokens: graphs take rows of them.
bool is_read_by_rows(role r);
// What graphs multiply by way of builder::product() or experts(), and the embeddings of tokens.
bool is_multiplied_by_adapters(const known_tensor & known);
// Whether what a delta net takes and its gate are in one matrix only, as in older files of Qwen 3 Next. Newer ones may have it, too.
bool is_older(const gguf_file & file, uint32_t layer);

// Of all of a file's tensors, or of those of a stage.
struct tensor_totals {
    int64_t n_params;
    uint64_t bytes;
};

// What can be told of a model before its weights are placed: names, shapes and types of all of the file fit the recipe.
// error(KVG_MODEL_LOAD), error(KVG_UNSUPPORTED)
tensor_totals check_tensors(const gguf_file & file, const hparams & h);

} // namespace kvg
