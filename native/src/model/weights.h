// A model's tensors, placed where its layers run.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <ggml-cpp.h>

#include "model/arch.h"
#include "model/gguf_file.h"
#include "model/hparams.h"
#include "model/known_tensors.h"
#include "model/placement.h"
#include "model/stage.h"

namespace kvg {

// Whether weights are read, or only placed as if they were: enough to ask devices what they can do and what it takes.
enum class loading {
    read,
    measure
};

// A matrix that an adapter may add to.
struct adaptable {
    ggml_tensor * const * tensor;
    ggml_backend_dev_t device; // where it lies, and what is added must lie too
};

// Checks every tensor's name, shape and type against the recipe, places them, and never changes afterwards: contexts share one.
class model {
public:
    // error(KVG_MODEL_LOAD), error(KVG_UNSUPPORTED), error(KVG_DEVICE) before anything is placed when a device has too little room
    // and what read_stage() raises. stage: its layers; [0, 0): all. draft_heads: whether these are wanted
    model(const std::string & path, const placement_request & request, loading how,
          const std::vector<key_override> & overrides = {}, const stage_request & stage = {}, bool draft_heads = false);
    // A file that drafts for it. To be called before any context uses the model. error(KVG_UNSUPPORTED) for one of another model, and as
    // the constructor
    void load_assistant(const std::string & path);
    const model * assistant() const { return assistant_.get(); }
    // of an assistant: the model that it drafts for
    const model * target() const { return target_; }
    // Whether anything of its own drafts.
    bool drafts() const { return assistant_ || hparams_.n_draft_heads > 0; }

    const gguf_file & file() const { return file_; }
    const struct hparams & hparams() const { return hparams_; }
    const arch_recipe & arch() const { return arch_; }
    const class placement & placement() const { return placement_; }
    bool is_measured() const { return how_ == loading::measure; }
    const role_tensors & frame() const { return weights_.frame; }
    const std::vector<role_tensors> & layers() const { return weights_.layers; }
    // of the token embeddings
    ggml_backend_dev_t embedding_device() const { return embedding_device_; }
    // Whether LongRoPE has other factors for a context of so many cells than for the original length.
    bool uses_long_factors(uint32_t n_cells) const;
    // For a context of so many cells.
    const device_factors & rope_factors(uint32_t n_cells) const;
    // A sentence for each matrix that the CPU multiplies since the device of its layer can't.
    const std::vector<std::string> & kept_on_cpu() const { return kept_on_cpu_; }
    // By its name in the file; nullptr: there is no such matrix, or nothing can be added to it.
    const adaptable * find_adaptable(const std::string & name) const;
    // A matrix that another stage has.
    bool is_elsewhere(const std::string & name) const { return elsewhere_.count(name) > 0; }
    const tensor_totals & totals() const { return totals_; }
    // bytes of weights there, those in the mapped file and the assistant's included
    uint64_t bytes_on(ggml_backend_dev_t device) const;
    uint64_t mapped_bytes_on(ggml_backend_dev_t device) const; // of these, those that are mapped from the file

private:
    // The arguments are those of the constructor above; target: of an assistant, nullptr for others.
    model(const std::string & path, const placement_request & request, loading how, const std::vector<key_override> & overrides,
          const stage_request & stage, bool draft_heads, const model * target);

    // A tensor of the model, where it lies in the file, and where it goes.
    struct placed {
        const gguf_tensor * source;
        ggml_tensor ** target;
    };
    // Tensors that go to one buffer: a device's own kind, one that lays weights out anew for faster kernels, or the mapped file.
    struct group {
        ggml_backend_dev_t device;
        ggml_backend_buffer_type_t type;
        const file_window * window; // that has all of its tensors: a split model has several, and a stage
        std::vector<placed> tensors;
        bool mapped;
        uint64_t bytes; // that the buffer takes
        ggml_context_ptr ctx;
        ggml_backend_buffer_ptr buffer;
    };

    void map_stage();
    const file_window * window_of(const gguf_tensor & source) const;
    void plan();
    void add(const gguf_tensor * source, ggml_tensor ** target, ggml_backend_dev_t device, ggml_backend_buffer_type_t type);
    ggml_backend_dev_t multiplying_device(const gguf_tensor & source, ggml_backend_dev_t wanted);
    // Returns where it goes.
    ggml_backend_dev_t add_matrix(const gguf_tensor * source, ggml_tensor ** target, ggml_backend_dev_t wanted);
    void require_use_of_devices() const;
    void add_embedding(const gguf_tensor * source);
    void add_read_by_rows(const gguf_tensor * source, ggml_tensor ** target);
    ggml_backend_dev_t device_of_frame(role r) const;
    void create(group & group);
    void require_room() const;
    void place(group & group);

    const model * target_;
    gguf_file file_;
    std::map<const open_file *, std::deque<file_window>> windows_; // of a stage, which doesn't map the whole file
    struct hparams hparams_;
    const arch_recipe & arch_;
    class placement placement_;
    loading how_;
    tensor_totals totals_;
    ggml_backend_dev_t embedding_device_ = nullptr;
    model_weights weights_;
    std::vector<group> groups_;
    std::map<std::string, adaptable> adaptable_;
    std::set<std::string> elsewhere_; // what is there for adapters in other stages
    std::vector<std::string> kept_on_cpu_;
    std::set<ggml_backend_dev_t> multiplying_; // devices that have a matrix
    std::unique_ptr<const model> assistant_;
};

} // namespace kvg
