#include "model/adapter.h"

#include <cmath>
#include <iterator>

#include "device.h"
#include "error.h"
#include "host_memory.h"
#include "model/weight_types.h"

namespace kvg {

namespace {

constexpr const char * EMBEDDING = "token_embd.weight";

bool ends_with(const std::string & text, const std::string & end) {
    return text.size() > end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

std::string shape_text(const gguf_tensor & t) {
    return strformat("%lld x %lld x %lld", (long long) t.ne[0], (long long) t.ne[1], (long long) t.ne[2]);
}

} // namespace

adapter::adapter(std::shared_ptr<const model> of, const std::string & path) : of_(std::move(of)), file_(path, parts::this_one) {
    check_kind();
    std::map<std::string, source> found = pairs();
    for (auto each = found.begin(); each != found.end();) { // what is of other stages is checked there
        each = of_->is_elsewhere(each->first) ? found.erase(each) : std::next(each);
    }
    for (const auto & [name, pair] : found) {
        const adaptable * target = of_->find_adaptable(name);
        if (!target) {
            const bool is_there = of_->file().find_tensor(name) != nullptr;
            fail(is_there ? KVG_UNSUPPORTED : KVG_MODEL_LOAD, "%s: it adds to '%s', %s", path.c_str(), name.c_str(),
                 is_there ? "which graphs here don't multiply by; adapters can change matrices of products only"
                          : "which the model doesn't have: the adapter is of another model");
        }
        check(name, pair, *target);
    }
    place(found);
}

void adapter::check_kind() {
    const char * path = file_.path().c_str();
    const std::string type = file_.get_string("general.type").value_or("");
    if (type != "adapter") {
        fail(KVG_MODEL_LOAD, "%s is no adapter: 'general.type' is '%s', expected 'adapter'", path, type.c_str());
    }
    const std::string kind = file_.get_string("adapter.type").value_or("");
    if (kind != "lora") {
        fail(KVG_UNSUPPORTED, "%s: an adapter of type '%s'; 'lora' is supported", path, kind.c_str());
    }
    const std::string arch = file_.get_string("general.architecture").value_or("");
    if (arch != of_->hparams().arch) {
        fail(KVG_MODEL_LOAD, "%s: the adapter is for architecture '%s', and the model is '%s'", path, arch.c_str(),
             of_->hparams().arch.c_str());
    }
    if (file_.get_array_length("adapter.alora.invocation_tokens").value_or(0) > 0) {
        fail(KVG_UNSUPPORTED, "%s: it takes part only behind certain tokens (aLoRA), which is not supported", path);
    }
    const double alpha = file_.get_float("adapter.lora.alpha").value_or(0.0);
    if (!(std::abs(alpha) <= 1e6)) {
        fail(KVG_MODEL_LOAD, "%s: 'adapter.lora.alpha' is %g", path, alpha);
    }
    alpha_ = static_cast<float>(alpha);
}

// By the name of the model's matrix.
std::map<std::string, adapter::source> adapter::pairs() const {
    std::map<std::string, source> found;
    for (const gguf_tensor & t : file_.tensors()) {
        const bool is_a = ends_with(t.name, ".lora_a");
        if (!is_a && !ends_with(t.name, ".lora_b")) {
            fail(KVG_UNSUPPORTED, "%s: tensor '%s' is neither '.lora_a' nor '.lora_b'; running without it would be wrong",
                 file_.path().c_str(), t.name.c_str());
        }
        source & pair = found[t.name.substr(0, t.name.size() - 7)];
        (is_a ? pair.a : pair.b) = &t;
    }
    for (const auto & [name, pair] : found) {
        if (!pair.a || !pair.b) {
            fail(KVG_MODEL_LOAD, "%s: '%s' has a '.lora_%s' and no other half", file_.path().c_str(), name.c_str(),
                 pair.a ? "a" : "b");
        }
    }
    if (found.empty()) {
        fail(KVG_MODEL_LOAD, "%s: the adapter has no tensors", file_.path().c_str());
    }
    return found;
}

// Shapes, and whether the device can multiply by such types.
void adapter::check(const std::string & name, const source & pair, const adaptable & target) const {
    const char * path = file_.path().c_str();
    const gguf_tensor & a = *pair.a;
    const gguf_tensor & b = *pair.b;
    const ggml_tensor * weight = *target.tensor;
    const bool is_embedding = name == EMBEDDING;
    const int64_t rank = b.ne[0];
    const int64_t n_in = is_embedding ? a.ne[1] : a.ne[0];
    const bool fits = (is_embedding ? a.ne[0] : a.ne[1]) == rank && n_in == weight->ne[is_embedding ? 1 : 0] &&
                      b.ne[1] == weight->ne[is_embedding ? 0 : 1] && a.ne[2] == weight->ne[2] && b.ne[2] == weight->ne[2] &&
                      a.ne[3] == 1 && b.ne[3] == 1;
    if (!fits) {
        fail(KVG_MODEL_LOAD, "%s: '%s' is %lld x %lld x %lld in the model, and its lora_a is %s, its lora_b %s", path,
             name.c_str(), (long long) weight->ne[0], (long long) weight->ne[1], (long long) weight->ne[2],
             shape_text(a).c_str(), shape_text(b).c_str());
    }
    for (const gguf_tensor * t : {&a, &b}) {
        if (!is_weight_type(t->type)) {
            fail(KVG_UNSUPPORTED, "%s: tensor '%s' has type %s, which can't be used there", path, t->name.c_str(),
                 ggml_type_name(t->type));
        }
        const bool can = is_embedding && t == &a ? can_get_rows(target.device, t->type, t->ne[0], t->ne[1])
                                                 : can_multiply(target.device, *t, nullptr);
        if (!can) {
            fail(KVG_UNSUPPORTED, "%s: device %s can't use tensor '%s' of type %s; convert the adapter to F16", path,
                 ggml_backend_dev_name(target.device), t->name.c_str(), ggml_type_name(t->type));
        }
    }
}

void adapter::place(const std::map<std::string, source> & pairs) {
    std::map<ggml_backend_dev_t, ggml_context *> contexts;
    std::vector<std::pair<const gguf_tensor *, ggml_tensor *>> all;
    const auto make = [&](const gguf_tensor & t, ggml_backend_dev_t device) {
        ggml_context *& ctx = contexts[device];
        if (!ctx) {
            contexts_.push_back(new_ggml_context(2 * pairs.size() * ggml_tensor_overhead()));
            ctx = contexts_.back().get();
        }
        ggml_tensor * made = ggml_new_tensor_3d(ctx, t.type, t.ne[0], t.ne[1], t.ne[2]);
        ggml_set_name(made, t.name.c_str());
        all.emplace_back(&t, made);
        n_params_ += t.ne[0] * t.ne[1] * t.ne[2];
        return made;
    };
    for (const auto & [name, pair] : pairs) {
        const adaptable & target = *of_->find_adaptable(name);
        const float scale = alpha_ != 0.0f ? alpha_ / static_cast<float>(pair.b->ne[0]) : 1.0f;
        const low_rank made = {make(*pair.a, target.device), make(*pair.b, target.device), scale};
        if (name == EMBEDDING) {
            embedding_ = std::make_unique<low_rank>(made);
        } else {
            of_weights_[*target.tensor] = made;
        }
    }
    for (const auto & [device, ctx] : contexts) {
        buffers_.push_back(of_->is_measured() ? measured(device, ctx) : allocated(device, ctx));
        ggml_backend_buffer_set_usage(buffers_.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        bytes_ += ggml_backend_buffer_get_size(buffers_.back().get());
    }
    for (const auto & [source, tensor] : all) {
        if (!of_->is_measured()) {
            ggml_backend_tensor_set(tensor, source->data(), 0, source->size);
        }
    }
}

// Says where the tensors would be, and has no memory.
ggml_backend_buffer_ptr adapter::measured(ggml_backend_dev_t device, ggml_context * ctx) const {
    ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device), 0));
    if (!buffer) {
        fail(KVG_DEVICE, "%s made no buffer", ggml_backend_dev_name(device));
    }
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        t->buffer = buffer.get();
    }
    return buffer;
}

ggml_backend_buffer_ptr adapter::allocated(ggml_backend_dev_t device, ggml_context * ctx) const {
    const size_t n_bytes = ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, ggml_backend_dev_buffer_type(device));
    ggml_backend_buffer_ptr buffer;
    if (has_room(device, n_bytes)) {
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_dev_buffer_type(device)));
    }
    if (!buffer) {
        fail(KVG_DEVICE, "%s needs %s for the adapter %s and has %s free", ggml_backend_dev_name(device),
             format_bytes(n_bytes).c_str(), file_.path().c_str(), format_bytes(device_memory(device).free).c_str());
    }
    return buffer;
}

const low_rank * adapter::of_weight(const ggml_tensor * weight) const {
    const auto found = of_weights_.find(weight);
    return found == of_weights_.end() ? nullptr : &found->second;
}

} // namespace kvg
