// A model's tensors, placed where its layers run.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ggml-cpp.h>

#include "model/arch.h"
#include "model/gguf_file.h"
#include "model/hparams.h"

namespace kvg {

struct model_weights {
    ggml_tensor * token_embd = nullptr;  // (n_embd, n_vocab)
    ggml_tensor * output_norm = nullptr; // (n_embd)
    ggml_tensor * output = nullptr;      // (n_embd, n_vocab); token_embd when they are tied
    ggml_tensor * rope_freqs = nullptr;  // (head_dim / 2)
    std::vector<layer_weights> layers;
};

// Of all of a file's tensors.
struct tensor_totals {
    int64_t n_params;
    uint64_t bytes;
};

// What can be told of a model before its weights are placed: names, shapes and types all fit the recipe.
// error(KVG_MODEL_LOAD), error(KVG_UNSUPPORTED)
tensor_totals check_tensors(const gguf_file & file, const hparams & h);

// Checks every tensor's name, shape and type against the recipe, places them, and never changes afterwards: contexts share one.
class model {
public:
    // error(KVG_MODEL_LOAD), error(KVG_UNSUPPORTED), error(KVG_DEVICE)
    model(const std::string & path, const std::string & device);

    const gguf_file & file() const { return file_; }
    const struct hparams & hparams() const { return hparams_; }
    // where the layers live
    ggml_backend_dev_t device() const { return device_; }
    const std::vector<layer_weights> & layers() const { return weights_.layers; }
    ggml_tensor * token_embd() const { return weights_.token_embd; }
    ggml_tensor * output_norm() const { return weights_.output_norm; }
    ggml_tensor * output() const { return weights_.output; }
    // nullptr when the model has none
    ggml_tensor * rope_freqs() const { return weights_.rope_freqs; }
    const tensor_totals & totals() const { return totals_; }

private:
    // A tensor of the model, where it lies in the file, and where it goes: a device's own kind of buffer, or one that lays weights
    // out anew for faster kernels.
    struct placement {
        const gguf_tensor * source;
        ggml_tensor ** target;
        ggml_backend_dev_t device;
        ggml_backend_buffer_type_t buffer;
    };

    void plan(std::vector<placement> & out);
    void place(const std::vector<placement> & all);

    gguf_file file_;
    struct hparams hparams_;
    ggml_backend_dev_t device_;
    tensor_totals totals_;
    model_weights weights_;
    std::vector<ggml_context_ptr> contexts_;
    std::vector<ggml_backend_buffer_ptr> buffers_;
};

} // namespace kvg
