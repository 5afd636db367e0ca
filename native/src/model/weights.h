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

// Checks every tensor's name, shape and type against the recipe, places them, and never changes afterwards: contexts share one.
class model {
public:
    // error(KVG_MODEL_LOAD), error(KVG_UNSUPPORTED), error(KVG_DEVICE)
    model(const std::string & path, const std::string & device);

    const gguf_file & file() const { return file_; }
    const struct hparams & hparams() const { return hparams_; }
    // where the layers live
    ggml_backend_dev_t device() const { return device_; }
    const std::vector<layer_weights> & layers() const { return layers_; }
    ggml_tensor * token_embd() const { return token_embd_; }
    ggml_tensor * output_norm() const { return output_norm_; }
    ggml_tensor * output() const { return output_; }
    // (head_dim / 2), nullptr when the model has none
    ggml_tensor * rope_freqs() const { return rope_freqs_; }
    int64_t n_params() const { return n_params_; }
    uint64_t weight_bytes() const { return weight_bytes_; }

private:
    // A tensor of the model, where it lies in the file, and which device it goes to.
    struct placement {
        const gguf_tensor * source;
        ggml_tensor ** target;
        ggml_backend_dev_t device;
    };

    void plan(std::vector<placement> & out);
    void place(const std::vector<placement> & all, ggml_backend_dev_t device);

    gguf_file file_;
    struct hparams hparams_;
    ggml_backend_dev_t device_;
    std::vector<layer_weights> layers_;
    ggml_tensor * token_embd_ = nullptr;
    ggml_tensor * output_norm_ = nullptr;
    ggml_tensor * output_ = nullptr;
    ggml_tensor * rope_freqs_ = nullptr;
    int64_t n_params_ = 0;
    uint64_t weight_bytes_ = 0;
    std::vector<ggml_context_ptr> contexts_;
    std::vector<ggml_backend_buffer_ptr> buffers_;
};

// What can be told of a model before its weights are placed: names, shapes and types all fit the recipe.
void check_tensors(const gguf_file & file, const hparams & h);

} // namespace kvg
