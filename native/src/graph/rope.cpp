#include "graph/rope.h"

namespace kvg {

ggml_tensor * rope(ggml_context * ctx, ggml_tensor * x, ggml_tensor * positions, ggml_tensor * freq_factors,
                   const rope_params & params, bool in_place) {
    const auto apply = in_place ? ggml_rope_ext_inplace : ggml_rope_ext;
    // A pure rotation: no YaRN (ext_factor 0), so attn_factor 1 leaves the norm alone; the betas are then unused.
    return apply(ctx, x, positions, freq_factors, params.n_rot, params.mode, params.n_ctx_orig, params.freq_base,
                 params.freq_scale, /*ext_factor*/ 0.0f, /*attn_factor*/ 1.0f, /*beta_fast*/ 32.0f, /*beta_slow*/ 1.0f);
}

} // namespace kvg
