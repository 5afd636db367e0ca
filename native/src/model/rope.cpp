#include "model/rope.h"

#include <cmath>

namespace kvg {

ggml_tensor * rope(ggml_context * ctx, ggml_tensor * x, ggml_tensor * positions, ggml_tensor * freq_factors,
                   const rope_params & params, bool in_place, float gain) {
    const auto apply = in_place ? ggml_rope_ext_inplace : ggml_rope_ext;
    // A pure rotation: no YaRN (ext_factor 0), so attn_factor is all that touches the norm; the betas are then unused.
    return apply(ctx, x, positions, freq_factors, params.n_rot, params.mode, params.n_ctx_orig, params.freq_base,
                 params.freq_scale, /*ext_factor*/ 0.0f, /*attn_factor*/ gain, /*beta_fast*/ 32.0f, /*beta_slow*/ 1.0f);
}

ggml_tensor * rotate_pairs(ggml_context * ctx, ggml_tensor * x, ggml_tensor * ones, ggml_tensor * inverse_angles,
                           const rope_params & params) {
    rope_params alike = params; // rotate every pair by one radian per position, divided by its factor
    alike.freq_base = 1.0f;     // YaRN divides by its logarithm, but YaRN is off, as above
    alike.freq_scale = 1.0f;
    return rope(ctx, x, ones, inverse_angles, alike, false);
}

std::vector<double> rope_angles(const ggml_tensor * freq_factors, const rope_params & params) {
    std::vector<float> factors(static_cast<size_t>(params.n_rot) / 2, 1.0f);
    if (freq_factors) {
        ggml_backend_tensor_get(freq_factors, factors.data(), 0, factors.size() * sizeof(float));
    }
    std::vector<double> angles;
    for (const float factor : factors) {
        const double exponent = -2.0 * static_cast<double>(angles.size()) / params.n_rot;
        angles.push_back(std::pow(params.freq_base, exponent) * params.freq_scale / factor);
    }
    return angles;
}

} // namespace kvg
