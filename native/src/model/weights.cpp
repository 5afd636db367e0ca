#include "model/weights.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "device.h"
#include "error.h"
#include "parallel.h"

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

// Buffers of this device that lay weights out anew, for faster kernels. "AMX" is left out: compiled by GCC 12, its kernels crash.
std::vector<ggml_backend_buffer_type_t> repacking_buffers(ggml_backend_dev_t dev) {
    std::vector<ggml_backend_buffer_type_t> found;
    void * address = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), "ggml_backend_dev_get_extra_bufts");
    const auto list = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(address);
    for (ggml_backend_buffer_type_t * type = list ? list(dev) : nullptr; type && *type; ++type) {
        if (strcmp(ggml_backend_buft_name(*type), "AMX") != 0) {
            found.push_back(*type);
        }
    }
    return found;
}

// The buffer in which the device multiplies this matrix fastest.
ggml_backend_buffer_type_t multiplying_buffer(ggml_backend_dev_t dev, const gguf_tensor & source) {
    for (ggml_backend_buffer_type_t type : repacking_buffers(dev)) {
        const ggml_context_ptr ctx = probe_context();
        ggml_tensor * w = ggml_new_tensor_2d(ctx.get(), source.type, source.ne[0], source.ne[1]);
        ggml_tensor * x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, source.ne[0], 8);
        const ggml_backend_buffer_ptr empty(
            ggml_backend_buft_alloc_buffer(type, 0)); // an answer depends on where a weight lies
        w->buffer = empty.get();
        if (empty && ggml_backend_dev_supports_op(dev, ggml_mul_mat(ctx.get(), w, x))) {
            return type;
        }
    }
    return ggml_backend_dev_buffer_type(dev);
}

bool can_get_rows(ggml_backend_dev_t dev, ggml_type type, int64_t ne0, int64_t ne1) {
    const ggml_context_ptr ctx = probe_context();
    ggml_tensor * w = ggml_new_tensor_2d(ctx.get(), type, ne0, ne1);
    ggml_tensor * ids = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 8);
    return ggml_backend_dev_supports_op(dev, ggml_get_rows(ctx.get(), w, ids));
}

constexpr const char * OUTPUT = "output.weight"; // absent when tied

// A tensor that the recipe knows.
struct known_tensor {
    std::string name;
    uint32_t ne0;
    uint32_t ne1; // 0: a vector
    bool required;
    ggml_tensor * model_weights::* of_model; // where it goes: a member of the model, or if nullptr of a layer
    ggml_tensor * layer_weights::* of_layer;
    uint32_t layer;

    ggml_tensor *& in(model_weights & weights) const { return of_model ? weights.*of_model : weights.layers[layer].*of_layer; }
};

std::vector<known_tensor> known_tensors(const hparams & h) {
    using m = model_weights;
    std::vector<known_tensor> known = {
        {"token_embd.weight", h.n_embd, h.n_vocab, true, &m::token_embd, nullptr, 0},
        {"output_norm.weight", h.n_embd, 0, true, &m::output_norm, nullptr, 0},
        {OUTPUT, h.n_embd, h.n_vocab, false, &m::output, nullptr, 0},
        {"rope_freqs.weight", static_cast<uint32_t>(h.rope.n_rot) / 2, 0, false, &m::rope_freqs, nullptr, 0},
    };
    for (uint32_t il = 0; il < h.n_layer; ++il) {
        for (const layer_tensor & t : find_arch(h.arch).layer) {
            known.push_back({strformat("blk.%u.%s", il, t.suffix), width(t.in, h), t.out == extent::none ? 0 : width(t.out, h),
                             t.required, nullptr, t.slot, il});
        }
    }
    return known;
}

void check_tensor(const gguf_file & file, const known_tensor & known) {
    const char * name = known.name.c_str();
    const gguf_tensor * t = file.find_tensor(known.name);
    if (!t) {
        if (known.required) {
            fail(KVG_MODEL_LOAD, "%s: tensor '%s' is missing", file.path().c_str(), name);
        }
        return;
    }
    const uint32_t ne1 = std::max(known.ne1, 1u);
    if (t->ne[0] != known.ne0 || t->ne[1] != ne1 || t->ne[2] != 1 || t->ne[3] != 1) {
        fail(KVG_MODEL_LOAD, "%s: tensor '%s' is %lld x %lld x %lld x %lld, expected %u x %u", file.path().c_str(), name,
             (long long) t->ne[0], (long long) t->ne[1], (long long) t->ne[2], (long long) t->ne[3], known.ne0, ne1);
    }
    if (known.ne1 == 0 ? t->type != GGML_TYPE_F32 : !is_weight_type(t->type)) {
        fail(KVG_UNSUPPORTED, "%s: tensor '%s' has type %s, which can't be used there", file.path().c_str(), name,
             ggml_type_name(t->type));
    }
}

} // namespace

tensor_totals check_tensors(const gguf_file & file, const hparams & h) {
    std::set<std::string> names;
    for (const known_tensor & known : known_tensors(h)) {
        check_tensor(file, known);
        names.insert(known.name);
    }
    tensor_totals totals = {};
    for (const gguf_tensor & t : file.tensors()) {
        if (names.count(t.name) == 0) {
            fail(KVG_UNSUPPORTED, "%s: tensor '%s' is not part of the recipe for '%s'; running without it would be wrong",
                 file.path().c_str(), t.name.c_str(), h.arch.c_str());
        }
        totals.n_params += t.ne[0] * t.ne[1];
        totals.bytes += t.size;
    }
    return totals;
}

model::model(const std::string & path, const std::string & device)
    : file_(path), hparams_(read_hparams(file_)), device_(find_device(device)), totals_(check_tensors(file_, hparams_)) {
    weights_.layers.resize(hparams_.n_layer);
    std::vector<placement> all;
    plan(all);
    while (!all.empty()) {
        const placement first = all.front();
        const auto rest = std::partition(
            all.begin(), all.end(), [&](const placement & p) { return p.device == first.device && p.buffer == first.buffer; });
        place({all.begin(), rest});
        all.erase(all.begin(), rest);
    }
    if (!weights_.output) {
        weights_.output = weights_.token_embd; // tied
    }
}

void model::plan(std::vector<placement> & out) {
    for (const known_tensor & known : known_tensors(hparams_)) {
        const gguf_tensor * source = file_.find_tensor(known.name);
        if (!source) {
            continue;
        }
        ggml_tensor ** target = &known.in(weights_);
        const bool is_embd = target == &weights_.token_embd;
        ggml_backend_dev_t where = device_;
        if (is_embd && !can_get_rows(device_, source->type, source->ne[0], source->ne[1])) {
            where = cpu_device();
        }
        if (!is_embd && source->ne[1] > 1 && !can_multiply(device_, source->type, source->ne[0], source->ne[1])) {
            fail(KVG_UNSUPPORTED, "%s: device %s can't multiply weights of type %s (tensor '%s'); use device=\"cpu\"",
                 file_.path().c_str(), ggml_backend_dev_name(device_), ggml_type_name(source->type), known.name.c_str());
        }
        const bool is_matrix = !is_embd && source->ne[1] > 1;
        out.push_back(
            {source, target, where, is_matrix ? multiplying_buffer(where, *source) : ggml_backend_dev_buffer_type(where)});
    }
    if (!file_.find_tensor(OUTPUT)) {
        // tied: one tensor serves both, unless the embedding has to stay on the CPU, or the output has a faster layout
        const placement embd =
            *std::find_if(out.begin(), out.end(), [&](const placement & p) { return p.target == &weights_.token_embd; });
        if (!can_multiply(device_, embd.source->type, embd.source->ne[0], embd.source->ne[1])) {
            fail(KVG_UNSUPPORTED, "%s: device %s can't multiply the tied output of type %s; use device=\"cpu\"",
                 file_.path().c_str(), ggml_backend_dev_name(device_), ggml_type_name(embd.source->type));
        }
        ggml_backend_buffer_type_t buffer = multiplying_buffer(device_, *embd.source);
        if (buffer != embd.buffer) {
            out.push_back({embd.source, &weights_.output, device_, buffer});
        }
    }
}

// Creates tensors that go to one kind of buffer: pointing into the mapped file where the device reads host memory, else uploaded.
void model::place(const std::vector<placement> & mine) {
    ggml_backend_dev_t device = mine.front().device;
    ggml_backend_buffer_type_t type = mine.front().buffer;
    ggml_context_ptr ctx(ggml_init({mine.size() * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true}));
    if (!ctx) {
        fail(KVG_DEVICE, "out of host memory for %zu tensors", mine.size());
    }
    uint64_t bytes = 0;
    bool aligned = true;
    for (const placement & p : mine) {
        *p.target = ggml_new_tensor_2d(ctx.get(), p.source->type, p.source->ne[0], p.source->ne[1]);
        ggml_set_name(*p.target, p.source->name.c_str());
        bytes += p.source->size;
        aligned = aligned && p.source->offset % ggml_backend_buft_get_alignment(type) == 0;
    }
    ggml_backend_buffer_ptr buffer;
    if (is_cpu(device) && aligned && ggml_backend_buft_is_host(type)) {
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
        if (is_cpu(device)) {
            advise_huge_pages(ggml_backend_buffer_get_base(buffer.get()), ggml_backend_buffer_get_size(buffer.get()));
        }
        // the CPU repacks as it writes, which takes longer than reading
        parallel_for(mine.size(), is_cpu(device) ? static_cast<size_t>(usable_cpus()) : 1, [&](size_t i) {
            const placement & p = mine[i];
            ggml_backend_tensor_set(*p.target, file_.file().data() + p.source->offset, 0, p.source->size);
            file_.file().release(p.source->offset, p.source->size);
        });
    }
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    contexts_.push_back(std::move(ctx));
    buffers_.push_back(std::move(buffer));
}

} // namespace kvg
