// A LoRA adapter (arXiv:2106.09685): pairs of narrow matrices, whose products are added to those with a model's own matrices.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ggml-cpp.h>

#include "model/gguf_file.h"
#include "model/weights.h"

namespace kvg {

// weight * x becomes weight * x + scale * (b * (a * x)).
struct low_rank {
    ggml_tensor * a; // (n_in, rank), or (n_in, rank, n_expert); of the embeddings of tokens (rank, n_vocab)
    ggml_tensor * b; // (rank, n_out), or (rank, n_out, n_expert)
    float scale;     // what its file says; an active adapter has another one beside it
};

// Of a GGUF file as llama.cpp makes them. It is placed beside the weights that it belongs to, and never changes afterwards.
class adapter {
public:
    // Nothing of the model is changed; of one that is only measured the adapter's matrices aren't read. error(KVG_NOT_FOUND); error(KVG_MODEL_LOAD) for a file that is damaged, no adapter, or of another
    // model; error(KVG_UNSUPPORTED) for an adapter of another kind; error(KVG_DEVICE)
    adapter(std::shared_ptr<const model> of, const std::string & path);

    const gguf_file & file() const { return file_; }
    const model & of() const { return *of_; }
    float alpha() const { return alpha_; } // 0: products are not scaled by it
    int64_t n_params() const { return n_params_; }
    uint64_t bytes() const { return bytes_; }
    size_t n_pairs() const { return of_weights_.size() + (embedding_ ? 1 : 0); }
    // What is added to products with this matrix of the model, or nullptr.
    const low_rank * of_weight(const ggml_tensor * weight) const;
    // What is added to embeddings of tokens, or nullptr. An output that is tied to them gets nothing.
    const low_rank * of_embedding() const { return embedding_.get(); }

private:
    struct source {
        const gguf_tensor * a = nullptr;
        const gguf_tensor * b = nullptr;
    };
    void check_kind();
    std::map<std::string, source> pairs() const;
    void check(const std::string & name, const source & pair, const adaptable & target) const;
    void place(const std::map<std::string, source> & pairs);
    ggml_backend_buffer_ptr measured(ggml_backend_dev_t device, ggml_context * ctx) const;
    ggml_backend_buffer_ptr allocated(ggml_backend_dev_t device, ggml_context * ctx) const;

    std::shared_ptr<const model> of_;
    gguf_file file_;
    float alpha_ = 0.0f;
    int64_t n_params_ = 0;
    uint64_t bytes_ = 0;
    std::map<const ggml_tensor *, low_rank> of_weights_;
    std::unique_ptr<low_rank> embedding_;
    std::vector<ggml_context_ptr> contexts_;
    std::vector<ggml_backend_buffer_ptr> buffers_;
};

// An adapter that takes part, and what its products are multiplied by beside its own scale.
struct active_adapter {
    std::shared_ptr<const class adapter> adapter;
    float scale;
};

} // namespace kvg
