#include "model/assistant.h"

#include "error.h"

namespace kvg {

namespace {

void require_target(const char * path, const hparams & h, const hparams & target) {
    if (h.n_embd_target == 0) {
        fail(KVG_UNSUPPORTED,
             "%s is a model of architecture '%s' and no assistant: it drafts with cells of its own, as a second model", path,
             h.arch.c_str());
    }
    if (target.arch + "-assistant" != h.arch) {
        fail(KVG_UNSUPPORTED, "%s is of architecture '%s', and the model of '%s': it drafts for another one", path,
             h.arch.c_str(), target.arch.c_str());
    }
    if (!target.is_whole() || target.n_draft_heads > 0) {
        fail(KVG_UNSUPPORTED, "%s: an assistant drafts for a model whose layers are all here, and that has no draft head",
             path);
    }
    if (h.n_embd_target != target.n_embd || h.n_vocab != target.n_vocab) {
        fail(KVG_UNSUPPORTED,
             "%s drafts for a model with states of %u and %u tokens, and this one has states of %u and %u tokens: use the "
             "assistant of this model",
             path, h.n_embd_target, h.n_vocab, target.n_embd, target.n_vocab);
    }
}

} // namespace

hparams read_assistant(const gguf_file & file, const hparams & target) {
    hparams h = read_hparams(file);
    const char * path = file.path().c_str();
    require_target(path, h, target);
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        layer_spec & layer = h.layers[il];
        const uint32_t behind = layer.window > 0 ? 2 : 1; // the file's order is window, then full
        const layer_spec * read = behind <= target.n_layer() ? &target.layers[target.n_layer() - behind] : nullptr;
        const bool fits = read && read->attends() && read->window == layer.window && read->n_head_kv == layer.n_head_kv &&
                          read->head_dim_k == layer.head_dim_k && read->head_dim_v == layer.head_dim_v;
        if (!fits || layer.window == 1) { // a window of one token shows a draft nothing
            fail(KVG_UNSUPPORTED,
                 "%s: layer %u attends with %u KV heads of %u and a window of %u (0: none), and no layer of the model that "
                 "it would read is so",
                 path, il, layer.n_head_kv, layer.head_dim_k, layer.window);
        }
        layer.of_target = true;
        layer.kv_from = read->kv_from;
        layer.group = read->group;
    }
    return h;
}

void require_no_assistant(const gguf_file & file, const hparams & h) {
    if (h.n_embd_target > 0) {
        fail(KVG_UNSUPPORTED,
             "%s is an assistant ('%s'), which drafts for another model: load that one with this file as its assistant "
             "(Model(path, assistant=...), -md)",
             file.path().c_str(), h.arch.c_str());
    }
}

} // namespace kvg
