#include "model/stage.h"

#include <algorithm>

#include "error.h"
#include "model/assistant.h"

namespace kvg {

namespace {

// What of a model passes by its layers, so that hidden states alone don't take the next stage on.
const char * what_passes_by(const hparams & h) {
    if (h.encodes) {
        return "it is an encoder, of whose texts nothing stays in the cache";
    }
    if (h.n_altup > 0) {
        return "it has several hidden states for each token (AltUp)";
    }
    if (h.n_embd_layer > 0) {
        return "its layers have embeddings of their own for each token";
    }
    return nullptr;
}

void require_cut(const hparams & h, const std::string & path) {
    const char * arch = h.arch.c_str();
    if (h.n_draft_heads > 0) {
        fail(KVG_UNSUPPORTED, "%s: stages have no draft heads: load its layers without draft_heads", path.c_str());
    }
    if (const char * reason = what_passes_by(h)) {
        fail(KVG_UNSUPPORTED, "%s: a model of architecture '%s' can't be cut into stages: %s; load all of its layers",
             path.c_str(), arch, reason);
    }
    const auto begin = h.layers.begin() + h.here.begin;
    const auto end = h.layers.begin() + h.here.end;
    if (std::none_of(begin, end, [](const layer_spec & l) { return l.has_attention() || l.has_state(); })) {
        fail(KVG_UNSUPPORTED,
             "%s: layers %u to %u neither attend nor have a state: a stage of them would have no cache; cut elsewhere",
             path.c_str(), h.here.begin, h.here.end - 1);
    }
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        const uint32_t owner = h.layers[il].kv_from;
        if (h.here.has(il) != h.here.has(owner)) {
            fail(KVG_UNSUPPORTED,
                 "%s: layer %u reads K and V of layer %u, so one stage must have both ('%s'); layers %u to %u have one of them",
                 path.c_str(), il, owner, arch, h.here.begin, h.here.end - 1);
        }
    }
}

} // namespace

hparams read_stage(const gguf_file & file, const stage_request & stage, bool draft_heads) {
    hparams h = read_hparams(file, draft_heads);
    require_no_assistant(file, h);
    const int64_t n_layer = h.n_layer();
    if (stage.begin == 0 && (stage.end == 0 || stage.end == n_layer)) {
        return h;
    }
    if (stage.begin < 0 || stage.end <= stage.begin || stage.end > n_layer) {
        fail(KVG_INVALID_ARGUMENT, "%s has layers 0 to %lld: [%lld, %lld) is no range of them", file.path().c_str(),
             static_cast<long long>(n_layer - 1), static_cast<long long>(stage.begin), static_cast<long long>(stage.end));
    }
    h.here = {static_cast<uint32_t>(stage.begin), static_cast<uint32_t>(stage.end)};
    require_cut(h, file.path());
    const auto is_elsewhere = [&](uint32_t il) { return !h.here.has(il); };
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        h.layers[il].elsewhere = is_elsewhere(il);
    }
    for (group_spec & group : h.groups) {
        group.layers.erase(std::remove_if(group.layers.begin(), group.layers.end(), is_elsewhere), group.layers.end());
    }
    return h;
}

} // namespace kvg
