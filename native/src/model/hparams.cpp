#include "model/hparams.h"

#include <algorithm>
#include <cmath>

#include "error.h"
#include "model/arch.h"

namespace kvg {

namespace {

// Reads `<arch>.<key>` with bounds; says the file, the key and the bounds when they don't hold.
class reader {
public:
    reader(const gguf_file & file, const std::string & arch) : file_(file), prefix_(arch + ".") {}

    uint32_t required(const char * key, uint64_t lowest, uint64_t highest) const {
        return bounded(key, present(key, file_.get_uint(prefix_ + key)), lowest, highest);
    }
    uint32_t optional(const char * key, uint32_t fallback, uint64_t lowest, uint64_t highest) const {
        return bounded(key, file_.get_uint(prefix_ + key).value_or(fallback), lowest, highest);
    }
    // a number for each layer: one for all, or an array
    std::vector<uint32_t> required_per_layer(const char * key, uint64_t n_layer, uint64_t highest) const {
        return bounded(key, present(key, file_.get_uints(prefix_ + key, n_layer)), highest);
    }
    std::vector<uint32_t> optional_per_layer(const char * key, const std::vector<uint32_t> & fallback, uint64_t highest) const {
        const auto found = file_.get_uints(prefix_ + key, fallback.size());
        return found ? bounded(key, *found, highest) : fallback;
    }
    float required_number(const char * key, float lowest, float highest) const {
        return bounded(key, present(key, file_.get_float(prefix_ + key)), lowest, highest);
    }
    float optional_number(const char * key, float fallback, float lowest, float highest) const {
        return bounded(key, file_.get_float(prefix_ + key).value_or(static_cast<double>(fallback)), lowest, highest);
    }
    std::optional<std::string> text(const char * key) const { return file_.get_string(prefix_ + key); }

private:
    template <class T> T present(const char * key, std::optional<T> value) const {
        if (!value) {
            fail(KVG_MODEL_LOAD, "%s: key '%s%s' is missing", file_.path().c_str(), prefix_.c_str(), key);
        }
        return *value;
    }
    float bounded(const char * key, double value, float lowest, float highest) const {
        if (!(value >= static_cast<double>(lowest) && value <= static_cast<double>(highest))) {
            fail(KVG_MODEL_LOAD, "%s: '%s%s' is %g, expected %g to %g", file_.path().c_str(), prefix_.c_str(), key, value,
                 static_cast<double>(lowest), static_cast<double>(highest));
        }
        return static_cast<float>(value);
    }
    uint32_t bounded(const char * key, uint64_t value, uint64_t lowest, uint64_t highest) const {
        if (value < lowest || value > highest) {
            fail(KVG_MODEL_LOAD, "%s: '%s%s' is %llu, expected %llu to %llu", file_.path().c_str(), prefix_.c_str(), key,
                 (unsigned long long) value, (unsigned long long) lowest, (unsigned long long) highest);
        }
        return static_cast<uint32_t>(value);
    }
    std::vector<uint32_t> bounded(const char * key, const std::vector<uint64_t> & values, uint64_t highest) const {
        std::vector<uint32_t> out;
        for (const uint64_t value : values) {
            out.push_back(bounded(key, value, 1, highest));
        }
        return out;
    }

    const gguf_file & file_;
    std::string prefix_;
};

constexpr uint64_t MAX_LAYERS = 512;
constexpr uint64_t MAX_WIDTH = 1 << 20;
constexpr uint64_t MAX_POSITION = (uint64_t{1} << 31) - 1;

rope_params read_rope(const gguf_file & file, const reader & in, uint32_t n_ctx_train, uint32_t head_dim, int mode) {
    rope_params rope = {};
    rope.mode = mode;
    rope.with_factors = true;
    rope.n_rot = static_cast<int>(in.optional("rope.dimension_count", head_dim, 1, head_dim));
    rope.freq_base = in.optional_number("rope.freq_base", 10000.0f, 1e-3f, 1e12f);
    rope.n_ctx_orig = static_cast<int>(in.optional("rope.scaling.original_context_length", n_ctx_train, 1, MAX_POSITION));
    if (rope.n_rot % 2 != 0 || static_cast<uint32_t>(rope.n_rot) != head_dim) {
        fail(KVG_UNSUPPORTED, "%s: %d rotated dimensions of a head of %u; this architecture rotates whole heads of even size",
             file.path().c_str(), rope.n_rot, head_dim);
    }
    const std::string scaling = in.text("rope.scaling.type").value_or("linear");
    if (scaling != "linear" && scaling != "none") {
        fail(KVG_UNSUPPORTED, "%s: rope scaling '%s' is not supported yet (linear and frequency factors are)",
             file.path().c_str(), scaling.c_str());
    }
    float factor = in.optional_number("rope.scaling.factor", 0.0f, 0.0f, 1e6f);
    if (factor == 0.0f) {
        factor = in.optional_number("rope.scale_linear", 0.0f, 0.0f, 1e6f); // the key's older name
    }
    rope.freq_scale = factor == 0.0f || scaling == "none" ? 1.0f : 1.0f / factor;
    if (!std::isfinite(rope.freq_scale)) {
        fail(KVG_MODEL_LOAD, "%s: rope scaling factor %g is out of range", file.path().c_str(), static_cast<double>(factor));
    }
    return rope;
}

std::vector<layer_spec> read_layers(const gguf_file & file, const reader & in, const hparams & h, const arch_recipe & recipe) {
    const uint32_t n_layer = in.required("block_count", 1, MAX_LAYERS);
    const std::vector<uint32_t> n_head = in.required_per_layer("attention.head_count", n_layer, MAX_WIDTH);
    const std::vector<uint32_t> n_head_kv = in.optional_per_layer("attention.head_count_kv", n_head, MAX_WIDTH);
    const std::vector<uint32_t> n_ff = in.required_per_layer("feed_forward_length", n_layer, MAX_WIDTH * 4);
    const uint32_t head_dim = in.optional("attention.key_length", h.n_embd / n_head[0], 1, 4096);
    const uint32_t head_dim_v = in.optional("attention.value_length", h.n_embd / n_head[0], 1, 4096);
    const rope_params rope = read_rope(file, in, h.n_ctx_train, head_dim, recipe.rope_mode);
    std::vector<layer_spec> layers;
    for (uint32_t il = 0; il < n_layer; ++il) {
        if (n_head[il] % n_head_kv[il] != 0) {
            fail(KVG_MODEL_LOAD, "%s: %u query heads can't be shared out over %u KV heads", file.path().c_str(), n_head[il],
                 n_head_kv[il]);
        }
        if (static_cast<uint64_t>(n_head[il]) * std::max(head_dim, head_dim_v) > MAX_WIDTH * 4) {
            fail(KVG_MODEL_LOAD, "%s: %u heads of %u are more than any model has", file.path().c_str(), n_head[il], head_dim);
        }
        layer_spec layer = {};
        layer.n_head = n_head[il];
        layer.n_head_kv = n_head_kv[il];
        layer.head_dim_k = head_dim;
        layer.head_dim_v = head_dim_v;
        layer.rope = rope;
        layer.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
        layer.feed_forward = recipe.feed_forward;
        layer.n_ff = n_ff[il];
        layers.push_back(layer);
    }
    return layers;
}

} // namespace

hparams read_hparams(const gguf_file & file) {
    hparams h = {};
    const auto name = file.get_string("general.architecture");
    if (!name) {
        fail(KVG_MODEL_LOAD, "%s has no 'general.architecture': it is a GGUF file, but not of a model", file.path().c_str());
    }
    const arch_recipe & recipe = find_arch(*name);
    h.arch = *name;
    const reader in(file, h.arch);

    h.n_embd = in.required("embedding_length", 1, MAX_WIDTH);
    h.n_ctx_train = in.required("context_length", 1, MAX_POSITION);
    h.rms_eps = in.required_number("attention.layer_norm_rms_epsilon", 0.0f, 1.0f);
    if (in.optional("expert_count", 0, 0, MAX_WIDTH) > 0) {
        fail(KVG_UNSUPPORTED, "%s: mixtures of experts are not supported yet", file.path().c_str());
    }
    h.layers = read_layers(file, in, h, recipe);
    h.groups = make_groups(h.layers);

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
