#include "model/weights.h"

#include <algorithm>

#include "device.h"
#include "error.h"
#include "model/assistant.h"
#include "model/multiplying_buffer.h"
#include "model/weight_types.h"

namespace kvg {

model::model(const std::string & path, const placement_request & request, loading how,
             const std::vector<key_override> & overrides, const stage_request & stage, bool draft_heads)
    : model(path, request, how, overrides, stage, draft_heads, nullptr) {}

model::model(const std::string & path, const placement_request & request, loading how,
             const std::vector<key_override> & overrides, const stage_request & stage, bool draft_heads, const model * target)
    : target_(target), file_(path, parts::all, overrides, stage.end == 0 ? mapping::whole : mapping::directory),
      hparams_(target ? read_assistant(file_, target->hparams_) : read_stage(file_, stage, draft_heads)),
      arch_(find_arch(hparams_.arch)), placement_(request, hparams_.n_layer(), hparams_.here), how_(how),
      totals_(check_tensors(file_, hparams_)) {
    weights_.layers.resize(hparams_.n_layer());
    map_stage();
    plan();
    for (group & g : groups_) {
        create(g);
    }
    if (how == loading::read) {
        require_room();
    }
    for (group & g : groups_) {
        place(g);
    }
    if (!weights_.frame[role::output] && hparams_.is_last() && !hparams_.encodes) {
        weights_.frame[role::output] = weights_.frame[role::token_embd]; // tied
    }
}

// Where the model's output is, as all of its states pass there.
void model::load_assistant(const std::string & path) {
    const placement_request there = {ggml_backend_dev_name(placement_.output()), -1, {}};
    assistant_.reset(new model(path, there, how_, {}, {}, false, this));
}

const adaptable * model::find_adaptable(const std::string & name) const {
    const auto found = adaptable_.find(name);
    return found == adaptable_.end() ? nullptr : &found->second;
}

bool model::uses_long_factors(uint32_t n_cells) const {
    return hparams_.rope_factors == rope_factors::by_length &&
           static_cast<int64_t>(n_cells) > hparams_.layers[0].rope.n_ctx_orig;
}

const device_factors & model::rope_factors(uint32_t n_cells) const {
    if (hparams_.rope_factors != rope_factors::by_length) {
        return weights_.rope_freqs;
    }
    return uses_long_factors(n_cells) ? weights_.factors_long : weights_.factors_short;
}

uint64_t model::bytes_on(ggml_backend_dev_t device) const {
    uint64_t bytes = assistant_ ? assistant_->bytes_on(device) : 0;
    for (const group & g : groups_) {
        bytes += g.device == device ? g.bytes : 0;
    }
    return bytes;
}

uint64_t model::mapped_bytes_on(ggml_backend_dev_t device) const {
    uint64_t bytes = assistant_ ? assistant_->mapped_bytes_on(device) : 0;
    for (const group & g : groups_) {
        bytes += g.device == device && g.mapped ? g.bytes : 0;
    }
    return bytes;
}

// Of each file one window for tensors that lie side by side.
void model::map_stage() {
    if (file_.file().whole()) {
        return;
    }
    constexpr uint64_t NEAR = 1 << 16;                                // what is between them is alignment, or a small tensor
    std::map<const open_file *, std::map<uint64_t, uint64_t>> wanted; // begin, end
    for (const known_tensor & known : known_tensors(hparams_)) {
        const gguf_tensor * source = file_.find_tensor(known.name);
        if (source && is_here(known, hparams_, file_)) {
            wanted[source->file][source->offset] = source->offset + source->size;
        }
    }
    for (const auto & [file, ranges] : wanted) {
        const std::string & path = file_.path();
        uint64_t begin = ranges.begin()->first;
        uint64_t end = begin;
        for (const auto & [from, to] : ranges) {
            if (from > end + NEAR) {
                windows_[file].emplace_back(path, file->fd(), begin, end);
                begin = from;
            }
            end = std::max(end, to);
        }
        windows_[file].emplace_back(path, file->fd(), begin, end);
    }
}

const file_window * model::window_of(const gguf_tensor & source) const {
    if (const file_window * whole = source.file->whole()) {
        return whole;
    }
    const std::deque<file_window> & all = windows_.at(source.file);
    return &*std::find_if(all.begin(), all.end(), [&](const file_window & each) { return each.has(source.offset); });
}

void model::plan() {
    for (const known_tensor & known : known_tensors(hparams_)) {
        const gguf_tensor * source = file_.find_tensor(known.name);
        const bool is_unused =
            known.presence == presence::ignored || (known.presence == presence::older && !is_older(file_, known.layer));
        if (!source || is_unused) {
            continue;
        }
        if (!is_here(known, hparams_, file_)) {
            elsewhere_.insert(known.name);
            continue;
        }
        if (known.factors) {
            for (ggml_backend_dev_t device : placement_.devices()) {
                add(source, &(weights_.*known.factors)[device], device, ggml_backend_dev_buffer_type(device));
            }
            continue;
        }
        ggml_backend_dev_t device = known.layer == FRAME ? device_of_frame(known.role) : placement_.layer(known.layer);
        ggml_tensor ** target = &known.in(weights_);
        if (known.layer == FRAME && known.role == role::token_embd) {
            add_embedding(source);
        } else if (is_read_by_rows(known.role)) {
            add_read_by_rows(source, target);
        } else if (is_of_classifier(known.role)) {
            add(source, target, cpu_device(), ggml_backend_dev_buffer_type(cpu_device()));
        } else if (known.is_vector || !is_multiplied(known.role) || is_of_heads(known.role)) {
            add(source, target, device, ggml_backend_dev_buffer_type(device));
        } else {
            device = add_matrix(source, target, device);
        }
        if (known.layer == FRAME && known.role == role::token_embd && !hparams_.is_first()) {
            elsewhere_.insert(known.name); // here it is the output alone, to which adapters of embeddings add nothing
        } else if (is_multiplied_by_adapters(known)) {
            adaptable_[known.name] = {target,
                                      known.layer == FRAME && known.role == role::token_embd ? embedding_device_ : device};
        }
    }
    require_use_of_devices();
}

// What is made of them goes to the first layer, or comes from the last one.
ggml_backend_dev_t model::device_of_frame(role r) const {
    const bool first = r == role::layer_embd_proj || r == role::layer_embd_norm || r == role::type_embd ||
                       r == role::embd_norm || r == role::embd_norm_bias || r == role::altup_in;
    return first ? placement_.layer(0) : placement_.output();
}

void model::add(const gguf_tensor * source, ggml_tensor ** target, ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    const file_window * window = window_of(*source);
    const auto same = [&](const group & g) { return g.device == device && g.type == type && g.window == window; };
    auto found = std::find_if(groups_.begin(), groups_.end(), same);
    if (found == groups_.end()) {
        groups_.push_back({device, type, window, {}, false, 0, nullptr, nullptr});
        found = groups_.end() - 1;
    }
    found->tensors.push_back({source, target});
}

// Why a device can't multiply a matrix: what it does with a few rows of it tells size and type apart.
static std::string reason_against(ggml_backend_dev_t device, const gguf_tensor & source) {
    const char * name = ggml_backend_dev_name(device);
    gguf_tensor part = source;
    part.ne[1] = std::min<int64_t>(part.ne[1], 32);
    if (can_multiply(device, part, nullptr)) {
        return strformat("%s can't multiply weights of %s in one tensor ('%s')", name, format_bytes(source.size).c_str(),
                         source.name.c_str());
    }
    return strformat("%s can't multiply weights of type %s (tensor '%s')", name, ggml_type_name(source.type),
                     source.name.c_str());
}

// Tensor by tensor: one that is too large for a device, or of a type that it doesn't know, goes to the CPU.
ggml_backend_dev_t model::multiplying_device(const gguf_tensor & source, ggml_backend_dev_t wanted) {
    if (can_multiply(wanted, source, nullptr)) {
        multiplying_.insert(wanted);
        return wanted;
    }
    const std::string reason = reason_against(wanted, source);
    if (!can_multiply(cpu_device(), source, nullptr)) {
        fail(KVG_UNSUPPORTED, "%s: %s, and the CPU can't either", file_.path().c_str(), reason.c_str());
    }
    kept_on_cpu_.push_back(reason);
    return cpu_device();
}

ggml_backend_dev_t model::add_matrix(const gguf_tensor * source, ggml_tensor ** target, ggml_backend_dev_t wanted) {
    ggml_backend_dev_t device = multiplying_device(*source, wanted);
    add(source, target, device, multiplying_buffer(device, *source));
    return device;
}

// A device with layers that multiplies nothing would only make each step slower.
void model::require_use_of_devices() const {
    for (uint32_t il = 0; il < placement_.n_layer(); ++il) {
        ggml_backend_dev_t device = placement_.layer(il);
        if (!is_cpu(device) && multiplying_.count(device) == 0 && !kept_on_cpu_.empty()) {
            fail(KVG_UNSUPPORTED, "%s: %s; use device=\"cpu\"", file_.path().c_str(), kept_on_cpu_.front().c_str());
        }
    }
}

// It goes where the first layer is, if rows can be read there. When it is tied to the output, one tensor serves both, unless the
// output is elsewhere, or has a faster layout.
void model::add_embedding(const gguf_tensor * source) {
    if (!hparams_.is_first() || target_) { // an assistant reads its target's embeddings
        add_matrix(source, &weights_.frame[role::output], placement_.output());
        return;
    }
    ggml_backend_dev_t first = placement_.layer(0);
    if (!can_get_rows(first, source->type, source->ne[0], source->ne[1])) {
        first = cpu_device();
    }
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(first);
    add(source, &weights_.frame[role::token_embd], first, type);
    embedding_device_ = first;
    if (!hparams_.is_last() || !is_tied(hparams_, file_)) {
        return;
    }
    ggml_backend_dev_t output = multiplying_device(*source, placement_.output());
    if (output != first || multiplying_buffer(output, *source) != type) {
        add(source, &weights_.frame[role::output], output, multiplying_buffer(output, *source));
    }
}

// What layers have of their own for each token is larger than all else in small models, and only read by rows: it stays in host memory.
// Embeddings of positions are small, and lie beside them.
void model::add_read_by_rows(const gguf_tensor * source, ggml_tensor ** target) {
    if (!can_get_rows(cpu_device(), source->type, source->ne[0], source->ne[1])) {
        fail(KVG_UNSUPPORTED, "%s: rows of type %s can't be read (tensor '%s')", file_.path().c_str(),
             ggml_type_name(source->type), source->name.c_str());
    }
    add(source, target, cpu_device(), ggml_backend_dev_buffer_type(cpu_device()));
}

} // namespace kvg
