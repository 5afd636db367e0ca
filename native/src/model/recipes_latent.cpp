// Attention by a latent: tensors, and what files say of it.
#include <cmath>

#include "error.h"
#include "model/recipes.h"

namespace kvg {

// With the matrices of heads taken apart.
tensors latent_attention() {
    constexpr auto here = with::attention;
    const auto of_heads = [](const char * name, role r, extent in, extent out) {
        return tensor_spec{name, r, {in, out, extent::heads}, presence::required, here};
    };
    const tensors queries = {
        matrix("attn_q.weight", role::wq, extent::embd, extent::q, presence::required, with::q_plain),
        matrix("attn_q_a.weight", role::q_down, extent::embd, extent::q_rank, presence::required, with::q_latent),
        vector_of("attn_q_a_norm.weight", role::q_down_norm, extent::q_rank, presence::required, with::q_latent),
        matrix("attn_q_b.weight", role::wq, extent::q_rank, extent::q, presence::required, with::q_latent),
    };
    return unscaled(queries) +
           tensors{
               {"attn_kv_a_mqa.weight", role::latent_down, {extent::embd, extent::head_k, one}, presence::required, here},
               vector_of("attn_kv_a_norm.weight", role::latent_norm, extent::latent_rank, presence::required, here),
               of_heads("attn_k_b.weight", role::latent_k, extent::latent_plain, extent::latent_rank),
               of_heads("attn_v_b.weight", role::latent_v, extent::latent_rank, extent::latent_out),
               matrix("attn_output.weight", role::wo, extent::out, extent::embd, presence::required, here),
           };
}

void read_latent(const metadata & in, layer_spec & layer) {
    const char * path = in.file().path().c_str();
    const uint32_t rank = in.required("attention.kv_lora_rank", 1, 4096);
    layer.latent.head_dim = in.required("attention.key_length_mla", 1, 4096);
    layer.latent.head_dim_out = in.required("attention.value_length_mla", 1, 4096);
    layer.latent.n_behind = static_cast<uint32_t>(layer.rope.n_rot);
    layer.scale = 1.0f / std::sqrt(static_cast<float>(layer.latent.head_dim));
    if (layer.latent.n_behind >= layer.latent.head_dim) {
        fail(KVG_MODEL_LOAD, "%s: queries of %u dimensions, and %u of them lie behind the latent", path, layer.latent.head_dim,
             layer.latent.n_behind);
    }
    if (layer.n_head_kv != 1 || layer.head_dim_v != rank || layer.head_dim_k != rank + layer.latent.n_behind) {
        fail(KVG_UNSUPPORTED,
             "%s: %u heads of K of %u and of V of %u beside a latent of %u and %u; only files whose K is the latent run, as "
             "newer converters make them",
             path, layer.n_head_kv, layer.head_dim_k, layer.head_dim_v, rank, layer.latent.n_behind);
    }
}

} // namespace kvg
