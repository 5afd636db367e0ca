#include "model/hparams.h"

#include <algorithm>
#include <cmath>

#include "error.h"
#include "model/arch.h"
#include "model/metadata.h"

namespace kvg {

namespace {

constexpr uint64_t MAX_LAYERS = 512;
constexpr uint64_t MAX_EXPERTS = 512; // libllama's limit, too
constexpr uint64_t MAX_WIDTH = metadata::MAX_WIDTH;
constexpr uint64_t MAX_POSITION = metadata::MAX_POSITION;
constexpr const char * RMS_EPSILON = "attention.layer_norm_rms_epsilon";

rope_params read_rope(const metadata & in, uint32_t n_ctx_train, uint32_t head_dim, const arch_recipe & recipe) {
    const char * path = in.file().path().c_str();
    rope_params rope = {};
    rope.mode = recipe.rope_mode;
    rope.with_factors = true;
    rope.ramp_fast = 32.0f;
    rope.ramp_slow = 1.0f;
    rope.n_rot = static_cast<int>(in.optional("rope.dimension_count", head_dim, 1, head_dim));
    rope.freq_base = in.optional_number("rope.freq_base", 10000.0f, 1e-3f, 1e12f);
    rope.n_ctx_orig = static_cast<int>(in.optional("rope.scaling.original_context_length", n_ctx_train, 1, MAX_POSITION));
    if (rope.n_rot % 2 != 0 || (!recipe.partial_rope && static_cast<uint32_t>(rope.n_rot) != head_dim)) {
        fail(KVG_UNSUPPORTED, "%s: %d rotated dimensions of a head of %u; architecture '%s' rotates %s", path, rope.n_rot,
             head_dim, recipe.name, recipe.partial_rope ? "pairs" : "whole heads of even size");
    }
    const std::string scaling = in.text("rope.scaling.type").value_or("linear");
    if (scaling != "linear" && scaling != "none" && scaling != "yarn" && scaling != "longrope") {
        fail(KVG_UNSUPPORTED, "%s: rope scaling '%s' is not supported; linear, yarn and longrope are", path, scaling.c_str());
    }
    float factor = in.optional_number("rope.scaling.factor", 0.0f, 0.0f, 1e6f);
    if (factor == 0.0f) {
        factor = in.optional_number("rope.scale_linear", 0.0f, 0.0f, 1e6f); // the key's older name
    }
    if (factor != 0.0f && factor < 1e-3f) {
        fail(KVG_MODEL_LOAD, "%s: rope scaling factor %g is out of range", path, static_cast<double>(factor));
    }
    rope.freq_scale = factor == 0.0f || scaling == "none" ? 1.0f : 1.0f / factor;
    rope.yarn = scaling == "yarn" ? 1.0f : 0.0f;
    rope.attn_factor = in.optional_number("rope.scaling.attn_factor", 1.0f, 1e-3f, 1e3f);
    return rope;
}

// Experts are chosen from the groups that have the best two.
void read_expert_groups(const metadata & in, feed_forward_spec & ff) {
    const uint32_t n = in.optional("expert_group_count", 0, 0, MAX_EXPERTS);
    if (n <= 1) {
        return;
    }
    ff.n_group = n;
    ff.n_group_used = in.required("expert_group_used_count", 1, n);
    const uint32_t n_in_group = ff.n_expert / n;
    if (ff.n_expert % n != 0 || n_in_group < 2 || n_in_group * ff.n_group_used < ff.n_expert_used) {
        fail(KVG_UNSUPPORTED, "%s: %u experts in %u groups, %u of which give %u", in.file().path().c_str(), ff.n_expert, n,
             ff.n_group_used, ff.n_expert_used);
    }
}

feed_forward_spec read_feed_forward(const metadata & in, const arch_recipe & recipe) {
    feed_forward_spec ff = {};
    ff.activation = recipe.activation;
    ff.gating = recipe.gating;
    ff.sums_to_1 = true;
    ff.n_expert = in.optional("expert_count", 0, 0, MAX_EXPERTS);
    const char * path = in.file().path().c_str();
    if (ff.n_expert > 0 && recipe.experts == arch_recipe::none) {
        fail(KVG_UNSUPPORTED, "%s: %u experts, and architecture '%s' has none", path, ff.n_expert, recipe.name);
    }
    if (ff.n_expert == 0 && recipe.experts == arch_recipe::always) {
        fail(KVG_MODEL_LOAD, "%s: no experts, and architecture '%s' is made of them", path, recipe.name);
    }
    if (ff.n_expert > 0) {
        ff.n_expert_used = in.required("expert_used_count", 1, ff.n_expert);
        read_expert_groups(in, ff);
    }
    return ff;
}

// The feed-forward's widths in each layer.
void read_widths(const metadata & in, const arch_recipe & recipe, std::vector<layer_spec> & layers) {
    const uint64_t n = layers.size();
    const bool any_experts = layers[0].feed_forward.n_expert > 0;
    std::vector<uint32_t> n_ff =
        any_experts && recipe.experts != arch_recipe::beside
            ? in.optional_per_layer("feed_forward_length", std::vector<uint32_t>(n, 0), 0, MAX_WIDTH * 4)
            : in.required_per_layer("feed_forward_length", n, recipe.attending == arch_recipe::all ? 1 : 0, MAX_WIDTH * 4);
    std::vector<uint32_t> n_ff_expert =
        in.optional_per_layer("expert_feed_forward_length", std::vector<uint32_t>(n, 0), 0, MAX_WIDTH * 4);
    for (size_t il = 0; il < n; ++il) {
        feed_forward_spec & ff = layers[il].feed_forward;
        ff.n_ff = n_ff[il];
        if (!any_experts) {
            continue;
        }
        if (recipe.experts == arch_recipe::beside) {
            const bool routed = in.file().find_tensor(strformat("blk.%zu.ffn_gate_inp.weight", il)) != nullptr;
            ff.n_expert = routed ? ff.n_expert : 0;
            ff.n_ff_expert = n_ff_expert[il];
        } else {
            // llama's files give experts the width of a dense layer, and older ones of others a share of it
            const uint32_t fallback = recipe.experts == arch_recipe::allowed ? n_ff[il] : n_ff[il] / ff.n_expert_used;
            ff.n_ff_expert = n_ff_expert[il] > 0 && recipe.experts == arch_recipe::always ? n_ff_expert[il] : fallback;
            ff.n_ff = 0;
        }
        if (ff.n_expert > 0 && ff.n_ff_expert == 0) {
            fail(KVG_MODEL_LOAD, "%s: the width of the experts of layer %zu is missing", in.file().path().c_str(), il);
        }
    }
}

std::vector<layer_spec> read_layers(const metadata & in, const hparams & h, const arch_recipe & recipe) {
    const char * path = in.file().path().c_str();
    const uint32_t n_layer = in.required("block_count", 1, MAX_LAYERS);
    const uint64_t fewest = recipe.attending == arch_recipe::all ? 1 : 0;
    const std::vector<uint32_t> n_head = in.required_per_layer("attention.head_count", n_layer, fewest, MAX_WIDTH);
    const std::vector<uint32_t> n_head_kv = in.optional_per_layer("attention.head_count_kv", n_head, fewest, MAX_WIDTH);
    const uint32_t most_heads = std::max(1u, *std::max_element(n_head.begin(), n_head.end()));
    const uint32_t head_dim = in.optional("attention.key_length", h.n_embd / most_heads, 1, 4096);
    const uint32_t head_dim_v = in.optional("attention.value_length", h.n_embd / most_heads, 1, 4096);
    const rope_params rope = read_rope(in, h.n_ctx_train, head_dim, recipe);
    const feed_forward_spec feed_forward = read_feed_forward(in, recipe);
    std::vector<layer_spec> layers;
    for (uint32_t il = 0; il < n_layer; ++il) {
        if (n_head_kv[il] > 0 && n_head[il] % n_head_kv[il] != 0) {
            fail(KVG_MODEL_LOAD, "%s: %u query heads can't be shared out over %u KV heads", path, n_head[il], n_head_kv[il]);
        }
        layer_spec layer = {};
        layer.kv_from = il;
        layer.n_head = n_head_kv[il] > 0 ? n_head[il] : 0;
        layer.n_head_kv = n_head_kv[il];
        layer.head_dim_k = head_dim;
        layer.head_dim_v = head_dim_v;
        layer.rope = rope;
        layer.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
        layer.feed_forward = feed_forward;
        layers.push_back(layer);
    }
    read_widths(in, recipe, layers);
    return layers;
}

norm_kind norm_of(const metadata & in, const arch_recipe & recipe) {
    const bool has_rms = recipe.norm_by_key && in.optional_number(RMS_EPSILON, 0.0f, 0.0f, 1.0f) > 0.0f;
    return has_rms ? norm_kind::rms : recipe.norm;
}

// A layer that does nothing of what its architecture's layers do would be left out in silence.
void require_mixing(const gguf_file & file, const hparams & h, const arch_recipe & recipe) {
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        const layer_spec & layer = h.layers[il];
        const bool may_only_feed = recipe.may_only_feed && layer.feed_forward.feeds();
        if (!layer.attends() && !layer.recurs() && !layer.linear && !may_only_feed) {
            fail(KVG_UNSUPPORTED,
                 "%s: layer %u neither attends nor has a state ('%s.attention.head_count' and '.head_count_kv' say so); "
                 "such layers are not supported in models of architecture '%s'",
                 file.path().c_str(), il, h.arch.c_str(), h.arch.c_str());
        }
    }
}

void require_possible_heads(const gguf_file & file, const std::vector<layer_spec> & layers) {
    for (const layer_spec & layer : layers) {
        if (uint64_t{layer.n_head} * std::max(layer.head_dim_k, layer.head_dim_v) > MAX_WIDTH * 4) {
            fail(KVG_MODEL_LOAD, "%s: %u heads of %u are more than any model has", file.path().c_str(), layer.n_head,
                 layer.head_dim_k);
        }
    }
}

// Layers that only guess tokens ahead are the last ones. Those that are not wanted, or of a kind that no recipe runs, are left out.
void keep_draft_heads(const gguf_file & file, hparams & h, const arch_recipe & recipe, bool wanted) {
    const std::string tensor = strformat("blk.%u.nextn.eh_proj.weight", h.n_layer() - h.n_draft_heads);
    h.has_draft_head = recipe.has_draft_head && h.n_draft_heads == 1 && h.layers.back().attends() && file.find_tensor(tensor);
    if (wanted && !h.has_draft_head) {
        fail(KVG_UNSUPPORTED,
             "%s has no draft head that can be used here ('%s.nextn_predict_layers' is %u): load it without draft_heads, and "
             "use "
             "other drafts",
             file.path().c_str(), h.arch.c_str(), h.n_draft_heads);
    }
    if (!wanted) {
        h.layers.resize(h.n_layer() - h.n_draft_heads);
        h.n_draft_heads = 0;
    }
}

} // namespace

uint32_t hparams::last_owner() const {
    uint32_t last = 0;
    for (uint32_t il = 0; il < n_layer(); ++il) {
        const bool owns = layers[il].recurs() || (layers[il].attends() && layers[il].kv_from == il);
        last = owns ? il : last;
    }
    return last;
}

bool hparams::tells_distances() const {
    return std::any_of(layers.begin(), layers.end(), [](const layer_spec & layer) { return layer.max_bias > 0.0f; });
}

uint64_t hparams::state_floats() const {
    uint64_t n = 0;
    for (const layer_spec & layer : layers) {
        n += layer.state_floats();
    }
    return n;
}

hparams read_hparams(const gguf_file & file, bool draft_heads) {
    hparams h = {};
    const auto name = file.get_string("general.architecture");
    if (!name) {
        fail(KVG_MODEL_LOAD, "%s has no 'general.architecture': it is a GGUF file, but not of a model", file.path().c_str());
    }
    const arch_recipe & recipe = find_arch(*name);
    h.arch = *name;
    const metadata in(file, h.arch);

    h.n_embd = in.required("embedding_length", 1, MAX_WIDTH);
    h.n_ctx_train = in.required("context_length", 1, MAX_POSITION);
    h.norm = norm_of(in, recipe);
    h.norm_eps = in.required_number(h.norm == norm_kind::layer ? "attention.layer_norm_epsilon" : RMS_EPSILON, 0.0f, 1.0f);
    h.post_norm_eps = h.norm_eps;
    h.draft_norm = h.norm;
    h.draft_norm_eps = h.norm_eps;
    h.residual_scale = 1.0f;
    h.logit_scale = 1.0f;
    h.embedding_scale = recipe.scaled_embedding ? std::sqrt(static_cast<float>(h.n_embd)) : 1.0f;
    h.rope_factors = recipe.rope_factors;
    if (h.rope_factors == rope_factors::of_model && in.text("rope.scaling.type") == "longrope") {
        h.rope_factors = rope_factors::by_length;
    }
    h.layers = read_layers(in, h, recipe);
    h.n_draft_heads = recipe.assists ? 0 : in.optional("nextn_predict_layers", 0, 0, h.n_layer() - 1);
    if (recipe.read) {
        recipe.read(in, h);
    }
    if (!h.encodes && !in.flag("attention.causal").value_or(true)) {
        fail(KVG_UNSUPPORTED, "%s: attention that is not causal ('%s.attention.causal') is not supported in architecture '%s'",
             file.path().c_str(), h.arch.c_str(), h.arch.c_str());
    }
    keep_draft_heads(file, h, recipe, draft_heads);
    require_mixing(file, h, recipe);
    require_possible_heads(file, h.layers);
    h.groups = make_groups(h.layers);
    h.here = {0, h.n_layer()};
    if (h.groups.front().layers.empty() && recipe.attending != arch_recipe::no_layer) {
        fail(KVG_UNSUPPORTED, "%s: none of its %u layers attends, and in architecture '%s' some do", file.path().c_str(),
             h.n_layer(), recipe.name);
    }

    const gguf_tensor * embd = file.find_tensor("token_embd.weight");
    if (!embd) {
        fail(KVG_MODEL_LOAD, "%s: tensor 'token_embd.weight' is missing", file.path().c_str());
    }
    if (embd->ne[1] > static_cast<int64_t>(MAX_POSITION)) {
        fail(KVG_MODEL_LOAD, "%s: a vocabulary of %lld", file.path().c_str(), static_cast<long long>(embd->ne[1]));
    }
    h.n_vocab = static_cast<uint32_t>(embd->ne[1]);
    const auto n_tokens = file.get_array_length("tokenizer.ggml.tokens");
    if (n_tokens && *n_tokens != h.n_vocab) {
        fail(KVG_MODEL_LOAD, "%s: the tokenizer has %llu tokens, 'token_embd.weight' %u rows", file.path().c_str(),
             (unsigned long long) *n_tokens, h.n_vocab);
    }
    return h;
}

} // namespace kvg
