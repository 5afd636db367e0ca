#include "model/weights.h"

#include <algorithm>
#include <set>

#include "device.h"
#include "error.h"

namespace kvg {

namespace {

// Types that ggml multiplies as weights. Its own intermediate types (Q8_1, Q8_K) and integers are not among them.
bool is_weight_type(ggml_type type) {
    if (type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16) {
        return true;
    }
    return ggml_is_quantized(type) && type != GGML_TYPE_Q8_1 && type != GGML_TYPE_Q8_K;
}

// A scratch context for tensors that only serve to ask a device a question.
ggml_context_ptr probe_context() {
    return ggml_context_ptr(ggml_init({/*mem_size*/ 8 * ggml_tensor_overhead(), /*mem_buffer*/ nullptr, /*no_alloc*/ true}));
}

bool can_multiply(ggml_backend_dev_t dev, ggml_type type, int64_t ne0, int64_t ne1) {
    const ggml_context_ptr ctx = probe_context();
    ggml_tensor * w = ggml_new_tensor_2d(ctx.get(), type, ne0, ne1);
    ggml_tensor * x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, ne0, 8);
    return ggml_backend_dev_supports_op(dev, ggml_mul_mat(ctx.get(), w, x));
}

bool can_get_rows(ggml_backend_dev_t dev, ggml_type type, int64_t ne0, int64_t ne1) {
    const ggml_context_ptr ctx = probe_context();
    ggml_tensor * w = ggml_new_tensor_2d(ctx.get(), type, ne0, ne1);
    ggml_tensor * ids = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 8);
    return ggml_backend_dev_supports_op(dev, ggml_get_rows(ctx.get(), w, ids));
}

// Calls visit(name, slot of a layer or nullptr, layer, ne0, ne1 (0: a vector), required) for every tensor the recipe knows.
template <class F> void for_each_tensor(const hparams & h, F visit) {
    visit("token_embd.weight", nullptr, 0u, h.n_embd, h.n_vocab, true);
    visit("output_norm.weight", nullptr, 0u, h.n_embd, 0u, true);
    visit("output.weight", nullptr, 0u, h.n_embd, h.n_vocab, false);
    visit("rope_freqs.weight", nullptr, 0u, static_cast<uint32_t>(h.rope.n_rot) / 2, 0u, false);
    for (uint32_t il = 0; il < h.n_layer; ++il) {
        for (const layer_tensor & t : find_arch(h.arch).layer) {
            visit(strformat("blk.%u.%s", il, t.suffix), &t, il, width(t.in, h), t.out == extent::none ? 0 : width(t.out, h),
                  t.required);
        }
    }
}

// nullptr when optional and absent
const gguf_tensor * checked_tensor(const gguf_file & file, const std::string & name, uint32_t ne0, uint32_t ne1,
                                   bool required) {
    const gguf_tensor * t = file.find_tensor(name);
    if (!t) {
        if (required) {
            fail(KVG_MODEL_LOAD, "%s: tensor '%s' is missing", file.path().c_str(), name.c_str());
        }
        return nullptr;
    }
    if (t->ne[0] != ne0 || t->ne[1] != std::max(ne1, 1u) || t->ne[2] != 1 || t->ne[3] != 1) {
        fail(KVG_MODEL_LOAD, "%s: tensor '%s' is %lld x %lld x %lld x %lld, expected %u x %u", file.path().c_str(),
             name.c_str(), (long long) t->ne[0], (long long) t->ne[1], (long long) t->ne[2], (long long) t->ne[3], ne0,
             std::max(ne1, 1u));
    }
    if (ne1 == 0 ? t->type != GGML_TYPE_F32 : !is_weight_type(t->type)) {
        fail(KVG_UNSUPPORTED, "%s: tensor '%s' has type %s, which can't be used there", file.path().c_str(), name.c_str(),
             ggml_type_name(t->type));
    }
    return t;
}

} // namespace

void check_tensors(const gguf_file & file, const hparams & h) {
    std::set<std::string> known;
    for_each_tensor(h,
                    [&](const std::string & name, const layer_tensor *, uint32_t, uint32_t ne0, uint32_t ne1, bool required) {
                        checked_tensor(file, name, ne0, ne1, required);
                        known.insert(name);
                    });
    for (const gguf_tensor & t : file.tensors()) {
        if (known.count(t.name) == 0) {
            fail(KVG_UNSUPPORTED, "%s: tensor '%s' is not part of the recipe for '%s'; running without it would be wrong",
                 file.path().c_str(), t.name.c_str(), h.arch.c_str());
        }
    }
}

model::model(const std::string & path, const std::string & device)
    : file_(path), hparams_(read_hparams(file_)), device_(find_device(device)) {
    check_tensors(file_, hparams_);
    layers_.resize(hparams_.n_layer);
    std::vector<placement> all;
    plan(all);
    place(all, device_);
    if (!is_cpu(device_)) {
        place(all, cpu_device());
    }
    if (!output_) {
        output_ = token_embd_; // tied
    }
}

void model::plan(std::vector<placement> & out) {
    for_each_tensor(hparams_, [&](const std::string & name, const layer_tensor * t, uint32_t il, uint32_t, uint32_t, bool) {
        const gguf_tensor * source = file_.find_tensor(name);
        if (!source) {
            return;
        }
        ggml_tensor ** target = t                             ? &(layers_[il].*(t->slot))
                                : name == "token_embd.weight" ? &token_embd_
                                : name == "output.weight"     ? &output_
                                : name == "rope_freqs.weight" ? &rope_freqs_
                                                              : &output_norm_;
        const bool is_embd = target == &token_embd_;
        ggml_backend_dev_t where = device_;
        if (is_embd && !can_get_rows(device_, source->type, source->ne[0], source->ne[1])) {
            where = cpu_device();
        }
        if (!is_embd && source->ne[1] > 1 && !can_multiply(device_, source->type, source->ne[0], source->ne[1])) {
            fail(KVG_UNSUPPORTED, "%s: device %s can't multiply weights of type %s (tensor '%s'); use device=\"cpu\"",
                 file_.path().c_str(), ggml_backend_dev_name(device_), ggml_type_name(source->type), name.c_str());
        }
        out.push_back({source, target, where});
        n_params_ += source->ne[0] * source->ne[1];
        weight_bytes_ += source->size;
    });
    if (!file_.find_tensor("output.weight")) {
        // tied: one tensor serves both, unless the embedding has to stay on the CPU
        const placement embd =
            *std::find_if(out.begin(), out.end(), [&](const placement & p) { return p.target == &token_embd_; });
        if (!can_multiply(device_, embd.source->type, embd.source->ne[0], embd.source->ne[1])) {
            fail(KVG_UNSUPPORTED, "%s: device %s can't multiply the tied output of type %s; use device=\"cpu\"",
                 file_.path().c_str(), ggml_backend_dev_name(device_), ggml_type_name(embd.source->type));
        }
        if (embd.device != device_) {
            out.push_back({embd.source, &output_, device_});
        }
    }
}

// Creates the tensors that go to a device: pointing into the mapped file where the device reads host memory, else uploaded.
void model::place(const std::vector<placement> & all, ggml_backend_dev_t device) {
    std::vector<placement> mine;
    std::copy_if(all.begin(), all.end(), std::back_inserter(mine), [&](const placement & p) { return p.device == device; });
    if (mine.empty()) {
        return;
    }
    ggml_context_ptr ctx(ggml_init({mine.size() * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true}));
    if (!ctx) {
        fail(KVG_DEVICE, "out of host memory for %zu tensors", mine.size());
    }
    uint64_t bytes = 0;
    bool aligned = true;
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    for (const placement & p : mine) {
        *p.target = ggml_new_tensor_2d(ctx.get(), p.source->type, p.source->ne[0], p.source->ne[1]);
        ggml_set_name(*p.target, p.source->name.c_str());
        bytes += p.source->size;
        aligned = aligned && p.source->offset % ggml_backend_buft_get_alignment(type) == 0;
    }
    ggml_backend_buffer_ptr buffer;
    if (is_cpu(device) && aligned) {
        void * base = const_cast<uint8_t *>(file_.file().data()); // mapped read-only; weights are never written
        buffer.reset(ggml_backend_dev_buffer_from_host_ptr(device, base, file_.file().size(), file_.file().size()));
        for (const placement & p : mine) {
            if (!buffer || ggml_backend_tensor_alloc(buffer.get(), *p.target,
                                                     static_cast<uint8_t *>(base) + p.source->offset) != GGML_STATUS_SUCCESS) {
                fail(KVG_DEVICE, "%s can't use the mapped file", ggml_backend_dev_name(device));
            }
        }
    } else {
        const memory there = device_memory(device);
        const bool fits = there.total == 0 || bytes <= there.free;
        buffer.reset(fits ? ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), type) : nullptr);
        if (!buffer) {
            fail(KVG_DEVICE, "%s needs %s for the weights and has %s free; use a smaller model or device=\"cpu\"",
                 ggml_backend_dev_name(device), format_bytes(bytes).c_str(), format_bytes(there.free).c_str());
        }
        for (const placement & p : mine) {
            ggml_backend_tensor_set(*p.target, file_.file().data() + p.source->offset, 0, p.source->size);
        }
    }
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    contexts_.push_back(std::move(ctx));
    buffers_.push_back(std::move(buffer));
}

} // namespace kvg
