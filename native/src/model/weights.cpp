#include "model/weights.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>

#include "cpu/products.h"
#include "device.h"
#include "error.h"
#include "host_memory.h"
#include "model/weight_types.h"
#include "parallel.h"

namespace kvg {

namespace {

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

// The buffer in which the device multiplies this matrix fastest. Our own kernels read it as the file has it.
ggml_backend_buffer_type_t multiplying_buffer(ggml_backend_dev_t dev, const gguf_tensor & source) {
    if (is_cpu(dev) && source.ne[2] == 1 && product_kernel_for(source.type)) {
        return ggml_backend_dev_buffer_type(dev);
    }
    for (ggml_backend_buffer_type_t type : repacking_buffers(dev)) {
        // an answer depends on where a weight lies
        const ggml_backend_buffer_ptr empty(ggml_backend_buft_alloc_buffer(type, 0));
        if (empty && can_multiply(dev, source, empty.get())) {
            return type;
        }
    }
    return ggml_backend_dev_buffer_type(dev);
}

constexpr uint32_t FRAME = UINT32_MAX; // in place of a layer's number

// A tensor that the recipe knows. Where it goes: rope factors if it has any, else by its role, unless it is ignored.
struct known_tensor {
    std::string name;
    std::array<int64_t, 3> shape;
    kvg::presence presence;
    kvg::role role;
    bool is_scale;
    uint32_t layer;
    device_factors model_weights::* factors;
    bool is_vector;

    ggml_tensor *& in(model_weights & weights) const {
        role_tensors & all = layer == FRAME ? weights.frame : weights.layers[layer];
        return is_scale ? all.scale(role) : all[role];
    }
};

// Biases of experts, and what states take as they are, may look like a matrix, and ggml multiplies nothing by them.
bool is_multiplied(kvg::role r) {
    return r != role::expert_gate_bias && r != role::expert_up_bias && r != role::expert_down_bias && r != role::taps &&
           r != role::type_embd && r != role::state_norm && r != role::state_decay && r != role::state_skip &&
           r != role::q_norm && r != role::k_norm;
}

// A matrix for each head or state, which no layout made for experts serves.
bool is_of_heads(kvg::role r) {
    return r == role::latent_k || r == role::latent_v || r == role::altup_in || r == role::altup_out;
}

// What graphs multiply by way of builder::product() or experts(), and the embeddings of tokens.
bool is_multiplied_by_adapters(const known_tensor & known) {
    const bool by_rows = known.role == role::layer_embd || known.role == role::position_embd;
    const bool is_matrix = !known.is_vector || known.role == role::shared_router;
    return is_matrix && !known.is_scale && is_multiplied(known.role) && !is_of_heads(known.role) && !by_rows;
}

std::vector<known_tensor> known_factors(const hparams & h) {
    int n_rot = 0;
    for (const layer_spec & layer : h.layers) {
        n_rot = std::max(n_rot, layer.rope.with_factors ? layer.rope.n_rot : 0);
    }
    const auto presence = n_rot > 0 ? presence::optional : presence::ignored; // where no layer rotates anything
    n_rot = n_rot > 0 ? n_rot : static_cast<int>(h.layers[0].head_dim_k);
    const auto known = [&](const char * name, device_factors model_weights::* set) {
        return known_tensor{name, {n_rot / 2, 1, 1}, presence, role::count, false, FRAME, set, true};
    };
    switch (h.rope_factors) {
    case rope_factors::none:
        break;
    case rope_factors::of_model:
        return {known("rope_freqs.weight", &model_weights::rope_freqs)};
    case rope_factors::by_length:
        return {known("rope_factors_long.weight", &model_weights::factors_long),
                known("rope_factors_short.weight", &model_weights::factors_short)};
    }
    return {};
}

bool has(const hparams & h, uint32_t il, with layers) {
    switch (layers) {
    case with::any:
        return true;
    case with::attention:
        return h.layers[il].attends();
    case with::q_plain:
        return h.layers[il].attends() && h.layers[il].latent.q_rank == 0;
    case with::q_latent:
        return h.layers[il].latent.q_rank > 0;
    case with::state:
        return h.layers[il].recurs();
    case with::shared_expert:
        return h.layers[il].feed_forward.n_ff_shared > 0;
    case with::dense:
        return h.layers[il].feed_forward.n_ff > 0;
    case with::experts:
        return h.layers[il].feed_forward.n_expert > 0;
    case with::own_kv:
        return h.layers[il].kv_from == il;
    case with::shared_kv:
        return h.layers[il].kv_from != il;
    case with::layer_embd:
        return h.n_embd_layer > 0;
    }
    return false;
}

// The tensor, and what may lie beside a matrix of the layer.
void add_known(std::vector<known_tensor> & known, const tensor_spec & t, const hparams & h, uint32_t il) {
    const layer_spec * layer = il == FRAME ? nullptr : &h.layers[il];
    const std::string name = layer ? strformat("blk.%u.%s", il, t.name) : t.name;
    std::array<int64_t, 3> shape = {};
    std::transform(t.shape.begin(), t.shape.end(), shape.begin(), [&](extent e) { return width(e, h, layer); });
    known.push_back({name, shape, t.presence, t.role, false, il, nullptr, t.shape[1] == extent::one});
    if (t.scale != scale::none) {
        const std::string stem = name.substr(0, name.rfind('.'));
        const auto scale_presence = t.scale == scale::applied ? presence::optional : presence::ignored;
        known.push_back({stem + ".scale", {shape[2], 1, 1}, scale_presence, t.role, true, il, nullptr, true});
        // for products in small numbers, which no device here makes
        known.push_back({stem + ".input_scale", {shape[2], 1, 1}, presence::ignored, t.role, true, il, nullptr, true});
    }
}

std::vector<known_tensor> known_tensors(const hparams & h) {
    const arch_recipe & recipe = find_arch(h.arch);
    std::vector<known_tensor> known = known_factors(h);
    for (const tensor_spec & t : recipe.frame) {
        if (has(h, FRAME, t.layers)) {
            add_known(known, t, h, FRAME);
        }
    }
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        for (const tensor_spec & t : recipe.layer) {
            if (has(h, il, t.layers)) {
                add_known(known, t, h, il);
            }
        }
    }
    return known;
}

// Whether the file has it in one matrix with others: Q, K and V, or gate and up of the experts.
bool is_fused(const gguf_file & file, const known_tensor & known) {
    const bool of_experts = known.role == role::expert_gate || known.role == role::expert_up;
    const char * whole = of_experts ? "blk.%u.ffn_gate_up_exps.weight" : "blk.%u.attn_qkv.weight";
    return file.find_tensor(strformat(whole, known.layer)) != nullptr;
}

// Whether what a delta net takes and its gate are in one matrix only, as in older files of Qwen 3 Next. Newer ones may have it, too.
bool is_older(const gguf_file & file, uint32_t layer) {
    return file.find_tensor(strformat("blk.%u.ssm_in.weight", layer)) &&
           !file.find_tensor(strformat("blk.%u.attn_qkv.weight", layer));
}

void check_tensor(const gguf_file & file, const known_tensor & known) {
    const char * name = known.name.c_str();
    const gguf_tensor * t = file.find_tensor(known.name);
    if (known.presence == presence::unless_older && t && is_older(file, known.layer)) {
        fail(KVG_UNSUPPORTED, "%s: tensor '%s' beside the older form of it, 'ssm_in.weight'", file.path().c_str(), name);
    }
    if (known.presence == presence::unless_fused && t && is_fused(file, known)) {
        fail(KVG_UNSUPPORTED, "%s: tensor '%s', and another one that holds it together with others", file.path().c_str(), name);
    }
    if (!t) {
        const bool needed = known.presence == presence::required ||
                            (known.presence == presence::unless_fused && !is_fused(file, known)) ||
                            (known.presence == presence::unless_older && !is_older(file, known.layer));
        if (needed) {
            fail(KVG_MODEL_LOAD, "%s: tensor '%s' is missing", file.path().c_str(), name);
        }
        return;
    }
    if (t->ne[0] != known.shape[0] || t->ne[1] != known.shape[1] || t->ne[2] != known.shape[2] || t->ne[3] != 1) {
        fail(KVG_MODEL_LOAD, "%s: tensor '%s' is %lld x %lld x %lld x %lld, expected %lld x %lld x %lld", file.path().c_str(),
             name, (long long) t->ne[0], (long long) t->ne[1], (long long) t->ne[2], (long long) t->ne[3],
             (long long) known.shape[0], (long long) known.shape[1], (long long) known.shape[2]);
    }
    const bool is_float = known.is_vector || !is_multiplied(known.role);
    if (is_float ? t->type != GGML_TYPE_F32 : !is_weight_type(t->type)) {
        fail(KVG_UNSUPPORTED, "%s: tensor '%s' has type %s, which can't be used there", file.path().c_str(), name,
             ggml_type_name(t->type));
    }
}

} // namespace

tensor_totals check_tensors(const gguf_file & file, const hparams & h) {
    std::set<std::string> names;
    std::vector<std::string> unused; // prefixes of layers that only guess tokens ahead
    for (const known_tensor & known : known_tensors(h)) {
        check_tensor(file, known);
        names.insert(known.name);
    }
    tensor_totals totals = {};
    const auto n_blocks = static_cast<uint32_t>(file.get_uint(h.arch + ".block_count").value_or(0));
    for (uint32_t il = h.n_layer(); il < n_blocks; ++il) {
        unused.push_back(strformat("blk.%u.", il));
    }
    const auto is_unused = [&](const std::string & name) {
        return std::any_of(unused.begin(), unused.end(), [&](const std::string & each) { return name.rfind(each, 0) == 0; });
    };
    for (const gguf_tensor & t : file.tensors()) {
        if (names.count(t.name) == 0 && !is_unused(t.name)) {
            fail(KVG_UNSUPPORTED, "%s: tensor '%s' is not part of the recipe for '%s'; running without it would be wrong",
                 file.path().c_str(), t.name.c_str(), h.arch.c_str());
        }
        totals.n_params += t.ne[0] * t.ne[1] * t.ne[2];
        totals.bytes += t.size;
    }
    return totals;
}

model::model(const std::string & path, const placement_request & request, loading how,
             const std::vector<key_override> & overrides)
    : file_(path, parts::all, overrides), hparams_(read_hparams(file_)), arch_(find_arch(hparams_.arch)),
      placement_(request, hparams_.n_layer()), how_(how), totals_(check_tensors(file_, hparams_)) {
    weights_.layers.resize(hparams_.n_layer());
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
    if (!weights_.frame[role::output] && !hparams_.encodes) {
        weights_.frame[role::output] = weights_.frame[role::token_embd]; // tied
    }
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
    uint64_t bytes = 0;
    for (const group & g : groups_) {
        bytes += g.device == device ? g.bytes : 0;
    }
    return bytes;
}

uint64_t model::mapped_bytes_on(ggml_backend_dev_t device) const {
    uint64_t bytes = 0;
    for (const group & g : groups_) {
        bytes += g.device == device && g.mapped ? g.bytes : 0;
    }
    return bytes;
}

void model::plan() {
    for (const known_tensor & known : known_tensors(hparams_)) {
        const gguf_tensor * source = file_.find_tensor(known.name);
        const bool is_unused =
            known.presence == presence::ignored || (known.presence == presence::older && !is_older(file_, known.layer));
        if (!source || is_unused) {
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
        } else if (known.role == role::layer_embd || known.role == role::position_embd) {
            add_read_by_rows(source, target);
        } else if (known.is_vector || !is_multiplied(known.role) || is_of_heads(known.role)) {
            add(source, target, device, ggml_backend_dev_buffer_type(device));
        } else {
            add_matrix(source, target, device);
        }
        if (is_multiplied_by_adapters(known)) {
            adaptable_[known.name] = {target,
                                      known.layer == FRAME && known.role == role::token_embd ? embedding_device_ : device};
        }
    }
}

// What is made of them goes to the first layer, or comes from the last one.
ggml_backend_dev_t model::device_of_frame(role r) const {
    const bool first = r == role::layer_embd_proj || r == role::layer_embd_norm || r == role::type_embd ||
                       r == role::embd_norm || r == role::embd_norm_bias || r == role::altup_in;
    return first ? placement_.layer(0) : placement_.output();
}

void model::add(const gguf_tensor * source, ggml_tensor ** target, ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    const auto same = [&](const group & g) { return g.device == device && g.type == type && g.file == source->file; };
    auto found = std::find_if(groups_.begin(), groups_.end(), same);
    if (found == groups_.end()) {
        groups_.push_back({device, type, source->file, {}, false, 0, nullptr, nullptr});
        found = groups_.end() - 1;
    }
    found->tensors.push_back({source, target});
}

void model::add_matrix(const gguf_tensor * source, ggml_tensor ** target, ggml_backend_dev_t device) {
    if (!can_multiply(device, *source, nullptr)) {
        fail(KVG_UNSUPPORTED, "%s: device %s can't multiply weights of type %s (tensor '%s'); use device=\"cpu\"",
             file_.path().c_str(), ggml_backend_dev_name(device), ggml_type_name(source->type), source->name.c_str());
    }
    add(source, target, device, multiplying_buffer(device, *source));
}

// It goes where the first layer is, if rows can be read there. When it is tied to the output, one tensor serves both, unless the
// output is elsewhere, or has a faster layout.
void model::add_embedding(const gguf_tensor * source) {
    ggml_backend_dev_t first = placement_.layer(0);
    if (!can_get_rows(first, source->type, source->ne[0], source->ne[1])) {
        first = cpu_device();
    }
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(first);
    add(source, &weights_.frame[role::token_embd], first, type);
    embedding_device_ = first;
    ggml_backend_dev_t output = placement_.output();
    if (!hparams_.encodes && !file_.find_tensor("output.weight") &&
        (output != first || multiplying_buffer(output, *source) != type || !can_multiply(output, *source, nullptr))) {
        add_matrix(source, &weights_.frame[role::output], output);
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

// The tensors, and what they take: those of a device that reads host memory point into the mapped file.
void model::create(group & g) {
    g.ctx = new_ggml_context(g.tensors.size() * ggml_tensor_overhead());
    g.mapped = is_cpu(g.device) && ggml_backend_buft_is_host(g.type);
    for (const placed & p : g.tensors) {
        *p.target = ggml_new_tensor_3d(g.ctx.get(), p.source->type, p.source->ne[0], p.source->ne[1], p.source->ne[2]);
        ggml_set_name(*p.target, p.source->name.c_str());
        g.mapped = g.mapped && p.source->offset % ggml_backend_buft_get_alignment(g.type) == 0;
        g.bytes += p.source->size;
    }
    if (!g.mapped) {
        g.bytes = ggml_backend_alloc_ctx_tensors_from_buft_size(g.ctx.get(), g.type);
    }
}

void model::require_room() const {
    std::map<ggml_backend_dev_t, uint64_t> needed;
    for (const group & g : groups_) {
        needed[g.device] += g.mapped ? 0 : g.bytes;
    }
    for (const auto & [device, bytes] : needed) {
        if (!has_room(device, bytes)) {
            fail(KVG_DEVICE, "%s needs %s for the weights and has %s free; use %s", ggml_backend_dev_name(device),
                 format_bytes(bytes).c_str(), format_bytes(device_memory(device).free).c_str(),
                 is_cpu(device) ? "a smaller model" : "fewer n_gpu_layers, another tensor_split or a smaller model");
        }
    }
}

void model::place(group & g) {
    if (how_ == loading::measure) {
        g.buffer.reset(ggml_backend_buft_alloc_buffer(g.type, 0));
        for (const placed & p : g.tensors) {
            (*p.target)->buffer = g.buffer.get(); // says where it would be, and has no address
        }
    } else if (g.mapped) {
        void * base = const_cast<uint8_t *>(g.file->data()); // mapped read-only; weights are never written
        g.buffer.reset(ggml_backend_dev_buffer_from_host_ptr(g.device, base, g.file->size(), g.file->size()));
        for (const placed & p : g.tensors) {
            if (!g.buffer ||
                ggml_backend_tensor_alloc(g.buffer.get(), *p.target, static_cast<uint8_t *>(base) + p.source->offset) !=
                    GGML_STATUS_SUCCESS) {
                fail(KVG_DEVICE, "%s can't use the mapped file", ggml_backend_dev_name(g.device));
            }
        }
    } else {
        g.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(g.ctx.get(), g.type));
        if (!g.buffer) {
            fail(KVG_DEVICE, "%s refused %s for the weights, with %s free; use fewer n_gpu_layers or a smaller model",
                 ggml_backend_dev_name(g.device), format_bytes(g.bytes).c_str(),
                 format_bytes(device_memory(g.device).free).c_str());
        }
        g.bytes = ggml_backend_buffer_get_size(g.buffer.get());
        if (is_cpu(g.device)) {
            advise_huge_pages(ggml_backend_buffer_get_base(g.buffer.get()), ggml_backend_buffer_get_size(g.buffer.get()));
        }
        // the CPU repacks as it writes, which takes longer than reading
        parallel_for(g.tensors.size(), is_cpu(g.device) ? static_cast<size_t>(usable_cpus()) : 1, [&](size_t i) {
            const placed & p = g.tensors[i];
            ggml_backend_tensor_set(*p.target, p.source->data(), 0, p.source->size);
            g.file->release(p.source->offset, p.source->size);
        });
    }
    if (!g.buffer) {
        fail(KVG_DEVICE, "%s made no buffer", ggml_backend_dev_name(g.device));
    }
    ggml_backend_buffer_set_usage(g.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
}

} // namespace kvg
