// What blocks make a graph with: room for tensors that grows, the device that each operation should run on, and at the end a graph of just
// the size that is needed.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ggml-cpp.h>

namespace kvg {

class builder {
public:
    // For the tensors of one operation: with room for MAX_OPERATION of them. Ask again for the next operation.
    ggml_context * ctx();
    static constexpr size_t MAX_OPERATION = 32;

    ggml_tensor * input(ggml_type type, int64_t ne0, int64_t ne1);
    // weight * x, plus the bias if it isn't nullptr
    ggml_tensor * linear(ggml_tensor * x, ggml_tensor * weight, ggml_tensor * bias);
    // The graph computes this, after the roots before it.
    void root(ggml_tensor * t) { roots_.push_back(t); }
    // What was made since the last call of this function should run there.
    void wish(ggml_backend_dev_t device);

    // Of each operation, in the order in which they were made.
    const std::vector<std::pair<ggml_tensor *, ggml_backend_dev_t>> & wishes() const { return wishes_; }
    // The graph of all roots; it lives as long as the builder. Nothing is made after that.
    ggml_cgraph * finish();

private:
    struct chunk {
        std::unique_ptr<uint8_t[]> arena; // ggml would abort where this throws
        ggml_context_ptr ctx;
        ggml_tensor * last_wished;
    };
    void open(size_t n_bytes);

    std::vector<chunk> chunks_;
    size_t first_unwished_ = 0; // of the chunks
    std::vector<ggml_tensor *> roots_;
    std::vector<std::pair<ggml_tensor *, ggml_backend_dev_t>> wishes_;
};

} // namespace kvg
