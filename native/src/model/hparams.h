// What the graphs need to know of a model, read from its metadata.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/gguf_file.h"
#include "model/layer_spec.h"

namespace kvg {

struct hparams {
    std::string arch;
    uint32_t n_embd;
    uint32_t n_vocab;
    uint32_t n_ctx_train;
    float rms_eps;
    std::vector<layer_spec> layers;
    std::vector<group_spec> groups; // of cells

    uint32_t n_layer() const { return static_cast<uint32_t>(layers.size()); }
};

// error(KVG_MODEL_LOAD) for missing or impossible values, error(KVG_UNSUPPORTED) for what no recipe here can run.
hparams read_hparams(const gguf_file & file);

} // namespace kvg
