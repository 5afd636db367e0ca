#include "model/arch.h"

#include "error.h"
#include "model/recipes.h"

namespace kvg {

namespace {

std::vector<arch_recipe> make_recipes() {
    std::vector<arch_recipe> all = plain_recipes();
    for (const auto & more : {gemma_recipes(), rms_recipes(), llama_like_recipes(), layer_norm_recipes(), expert_recipes(),
                              mixture_recipes(), gated_recipes(), hybrid_recipes(), encoder_recipes()}) {
        all.insert(all.end(), more.begin(), more.end());
    }
    return all;
}

const std::vector<arch_recipe> & recipes() {
    static const std::vector<arch_recipe> all = make_recipes();
    return all;
}

} // namespace

const arch_recipe & find_arch(const std::string & name) {
    std::string known;
    for (const arch_recipe & recipe : recipes()) {
        if (name == recipe.name) {
            return recipe;
        }
        if (!recipe.assists) { // it runs nothing by itself
            known += std::string(known.empty() ? "" : ", ") + recipe.name;
        }
    }
    fail(KVG_UNSUPPORTED, "architecture '%s' has no recipe yet; there are: %s", name.c_str(), known.c_str());
}

int64_t width(extent e, const hparams & h, const layer_spec * layer) {
    switch (e) {
    case extent::one:
        return 1;
    case extent::embd:
        return h.n_embd;
    case extent::embd_twice:
        return 2 * int64_t{h.n_embd};
    case extent::target_embd:
        return h.n_embd_target;
    case extent::target_embd_twice:
        return 2 * int64_t{h.n_embd_target};
    case extent::vocab:
        return h.n_vocab;
    case extent::positions:
        return h.n_ctx_train;
    case extent::token_types:
        return h.n_token_types;
    case extent::dense:
        return h.n_dense;
    case extent::classes:
        return h.classifier.n_classes;
    case extent::heads:
        return layer->n_head;
    case extent::heads_kv:
        return layer->n_head_kv;
    case extent::head_k:
        return layer->head_dim_k;
    case extent::q:
        return layer->q_rows();
    case extent::k:
        return layer->k_width();
    case extent::v:
        return layer->v_width();
    case extent::qkv:
        return int64_t{layer->q_rows()} + layer->k_width() + layer->v_width();
    case extent::out:
        return layer->out_width();
    case extent::ff:
        return layer->feed_forward.n_ff;
    case extent::gate_up:
        return 2 * int64_t{layer->feed_forward.n_ff};
    case extent::expert:
        return layer->feed_forward.n_expert;
    case extent::expert_ff:
        return layer->feed_forward.n_ff_expert;
    case extent::expert_gate_up:
        return 2 * int64_t{layer->feed_forward.n_ff_expert};
    case extent::expert_in:
        return layer->feed_forward.n_latent > 0 ? layer->feed_forward.n_latent : h.n_embd;
    case extent::shared_gate_up:
        return 2 * int64_t{layer->feed_forward.n_ff_shared};
    case extent::shared_ff:
        return layer->feed_forward.n_ff_shared;
    case extent::pairs:
        return h.layers[0].rope.n_rot / 2;
    case extent::state_in_gated:
        return layer->state.in_width() + layer->state.v_width();
    case extent::state_in:
        return layer->state.in_width();
    case extent::taps:
        return layer->state.n_taps;
    case extent::channels:
        return layer->state.n_channels;
    case extent::state_heads:
        return layer->state.n_head;
    case extent::state_heads_twice:
        return 2 * int64_t{layer->state.n_head};
    case extent::state_dim_v:
        return layer->state.head_dim_v;
    case extent::state_v:
        return layer->state.v_width();
    case extent::state_dim_k:
        return layer->state.head_dim_k;
    case extent::state_k:
        return layer->state.k_width();
    case extent::state_group:
        return layer->state.v_width() / layer->state.n_head_k;
    case extent::state_groups:
        return layer->state.n_head_k;
    case extent::embd_layer:
        return h.n_embd_layer;
    case extent::embd_layers:
        return int64_t{h.n_embd_layer} * h.n_layer();
    case extent::altup:
        return h.n_altup;
    case extent::altup_squared:
        return int64_t{h.n_altup} * h.n_altup;
    case extent::altup_others:
        return int64_t{h.n_altup} - 1;
    case extent::laurel:
        return h.laurel_rank;
    case extent::q_rank:
        return layer->latent.q_rank;
    case extent::latent_rank:
        return layer->head_dim_v;
    case extent::latent_plain:
        return layer->latent.head_dim - layer->latent.n_behind;
    case extent::latent_out:
        return layer->latent.head_dim_out;
    case extent::kv_rank:
        return layer->kv_rank;
    case extent::kv_rank_rotated:
        return int64_t{layer->kv_rank} + layer->rope.n_rot;
    case extent::kv_of_latent:
        return layer->n_head_kv * (int64_t{layer->head_dim_k} - layer->rope.n_rot + layer->head_dim_v);
    case extent::attn_gate:
        return layer->n_gate;
    }
    return 0;
}

} // namespace kvg
