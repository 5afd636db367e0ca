#include "model/known_tensors.h"

#include <algorithm>
#include <map>

#include "error.h"
#include "model/weight_types.h"

namespace kvg {

bool is_multiplied(role r) {
    return r != role::expert_gate_bias && r != role::expert_up_bias && r != role::expert_down_bias && r != role::taps &&
           r != role::type_embd && r != role::state_norm && r != role::state_decay && r != role::state_skip &&
           r != role::q_norm && r != role::k_norm;
}

bool is_of_heads(role r) { return r == role::latent_k || r == role::latent_v || r == role::altup_in || r == role::altup_out; }

bool is_of_classifier(role r) {
    return r == role::class_hidden || r == role::class_hidden_bias || r == role::class_norm || r == role::class_out ||
           r == role::class_out_bias;
}

bool is_read_by_rows(role r) { return r == role::layer_embd || r == role::position_embd || r == role::draft_embd; }

bool is_multiplied_by_adapters(const known_tensor & known) {
    const bool is_matrix = !known.is_vector || known.role == role::shared_router;
    return is_matrix && !known.is_scale && is_multiplied(known.role) && !is_of_heads(known.role) &&
           !is_of_classifier(known.role) && !is_read_by_rows(known.role);
}

bool is_older(const gguf_file & file, uint32_t layer) {
    return file.find_tensor(strformat("blk.%u.ssm_in.weight", layer)) &&
           !file.find_tensor(strformat("blk.%u.attn_qkv.weight", layer));
}

bool is_tied(const hparams & h, const gguf_file & file) { return !h.encodes && !file.find_tensor("output.weight"); }

bool is_here(const known_tensor & known, const hparams & h, const gguf_file & file) {
    if (known.layer != FRAME) {
        return h.here.has(known.layer);
    }
    switch (known.role) {
    case role::count: // rope's factors
        return true;
    case role::token_embd:
        return h.is_first() || (h.is_last() && is_tied(h, file));
    case role::output_norm:
    case role::output_norm_bias:
    case role::output:
    case role::output_bias:
    case role::class_hidden:
    case role::class_hidden_bias:
    case role::class_norm:
    case role::class_out:
    case role::class_out_bias:
        return h.is_last();
    default: // what embeddings go through; encoders, and models whose layers have more than hidden states, are not cut
        return h.is_first();
    }
}

namespace {

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
        return h.layers[il].has_attention();
    case with::linear:
        return h.layers[il].linear;
    case with::q_plain:
        return h.layers[il].has_attention() && h.layers[il].latent.q_rank == 0;
    case with::q_latent:
        return h.layers[il].latent.q_rank > 0;
    case with::state:
        return h.layers[il].has_state();
    case with::shared_expert:
        return h.layers[il].feed_forward.n_ff_shared > 0;
    case with::dense:
        return h.layers[il].feed_forward.n_ff > 0;
    case with::dense_apart:
        return h.layers[il].feed_forward.n_ff > 0 && !h.layers[il].feed_forward.in_one;
    case with::dense_in_one:
        return h.layers[il].feed_forward.n_ff > 0 && h.layers[il].feed_forward.in_one;
    case with::experts:
        return h.layers[il].feed_forward.n_expert > 0;
    case with::experts_alone:
        return h.layers[il].feed_forward.n_expert > 0 && !h.layers[il].has_attention();
    case with::own_kv:
        return h.layers[il].kv_from == il;
    case with::shared_kv:
        return h.layers[il].kv_from != il;
    case with::draft_head:
        return h.is_draft_head(il);
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

// Whether the file has it in one matrix with others: Q, K and V, or gate and up of the experts.
bool is_fused(const gguf_file & file, const known_tensor & known) {
    const bool of_experts = known.role == role::expert_gate || known.role == role::expert_up;
    const char * whole = of_experts ? "blk.%u.ffn_gate_up_exps.weight" : "blk.%u.attn_qkv.weight";
    return file.find_tensor(strformat(whole, known.layer)) != nullptr;
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

tensor_totals check_tensors(const gguf_file & file, const hparams & h) {
    std::map<std::string, bool> names; // whether it is here
    std::vector<std::string> unused;   // prefixes of layers that only guess tokens ahead
    for (const known_tensor & known : known_tensors(h)) {
        check_tensor(file, known);
        names[known.name] = is_here(known, h, file);
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
        const auto found = names.find(t.name);
        if (found == names.end() && !is_unused(t.name)) {
            fail(KVG_UNSUPPORTED, "%s: tensor '%s' is not part of the recipe for '%s'; running without it would be wrong",
                 file.path().c_str(), t.name.c_str(), h.arch.c_str());
        }
        if (found == names.end() ? h.is_whole() : found->second) {
            totals.n_params += t.ne[0] * t.ne[1] * t.ne[2];
            totals.bytes += t.size;
        }
    }
    return totals;
}

} // namespace kvg
