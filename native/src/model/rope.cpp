#include "model/rope.h"

#include <algorithm>
#include <cmath>

namespace kvg {

namespace {

// ggml multiplies rotated dimensions by this when there is a ramp.
float own_gain(const rope_params & params) {
    return params.yarn > 0.0f ? 1.0f + 0.1f * std::log(1.0f / params.freq_scale) : 1.0f;
}

// What YaRN scales pairs' frequencies by: a ramp between two limits.
class yarn_ramp {
public:
    explicit yarn_ramp(const rope_params & params) : params_(params) {
        ggml_rope_yarn_corr_dims(params.n_rot, params.n_ctx_orig, params.freq_base, params.ramp_fast, params.ramp_slow,
                                 limits_);
    }
    // The share of a pair's frequency that isn't scaled. T: what it is computed in
    template <class T> T unscaled_share(size_t pair) const {
        if (params_.yarn == 0.0f) {
            return 0; // the limits may be no numbers
        }
        const T first = limits_[0];
        const T y = (static_cast<T>(pair) - first) / std::max(static_cast<T>(0.001), limits_[1] - first);
        return params_.yarn * (1 - std::min<T>(1, std::max<T>(0, y)));
    }

private:
    const rope_params & params_;
    float limits_[2] = {};
};

} // namespace

float first_gain(const rope_params & params) { return params.attn_factor * std::max(1.0f, own_gain(params)); }

ggml_tensor * rope(ggml_context * ctx, ggml_tensor * x, ggml_tensor * positions, ggml_tensor * freq_factors,
                   const rope_params & params, bool in_place, float gain) {
    const auto apply = in_place ? ggml_rope_ext_inplace : ggml_rope_ext;
    ggml_tensor * y = apply(ctx, x, positions, freq_factors, params.n_rot, params.mode, params.n_ctx_orig, params.freq_base,
                            params.freq_scale, params.yarn, gain / own_gain(params), params.ramp_fast, params.ramp_slow);
    return params.offset > 0 ? ggml_rope_set_offset(y, params.offset) : y;
}

// A pair's angle grows out of that of the pair before, in floats: far on in a text that differs from what rope_angles() has.
void rope_rows(const int32_t * positions, uint32_t n_rows, const float * freq_factors, const rope_params & params,
               float * out) {
    const auto n = static_cast<uint32_t>(params.n_rot) / 2;
    const yarn_ramp ramp(params);
    const float step = std::pow(params.freq_base, -2.0f / static_cast<float>(params.n_rot));
    const float gain = first_gain(params) / own_gain(params) * own_gain(params); // as rope() and ggml round it
    for (uint32_t row = 0; row < n_rows; ++row, out += 2 * n) {
        auto angle = static_cast<float>(positions[row]);
        for (uint32_t i = 0; i < n; ++i, angle *= step) {
            const float unscaled = freq_factors ? angle / freq_factors[i] : angle;
            const auto share = ramp.unscaled_share<float>(i);
            const float scaled = params.freq_scale * unscaled * (1.0f - share) + unscaled * share;
            out[i] = std::cos(scaled) * gain;
            out[n + i] = std::sin(scaled) * gain;
        }
    }
}

ggml_tensor * rotate_pairs(ggml_context * ctx, ggml_tensor * x, ggml_tensor * ones, ggml_tensor * inverse_angles,
                           const rope_params & params) {
    rope_params alike = params; // rotate every pair by one radian per position, divided by its factor
    alike.yarn = 0.0f;          // its limits would divide by the logarithm of the base
    alike.freq_base = 1.0f;
    alike.freq_scale = 1.0f;
    return rope(ctx, x, ones, inverse_angles, alike, false, 1.0f);
}

std::vector<double> rope_angles(const ggml_tensor * freq_factors, const rope_params & params) {
    std::vector<float> factors(static_cast<size_t>(params.n_rot) / 2, 1.0f);
    if (freq_factors) {
        ggml_backend_tensor_get(freq_factors, factors.data(), 0, factors.size() * sizeof(float));
    }
    const yarn_ramp ramp(params);
    std::vector<double> angles;
    for (const float factor : factors) {
        const double exponent = -2.0 * static_cast<double>(angles.size()) / params.n_rot;
        const auto unscaled = ramp.unscaled_share<double>(angles.size());
        const double scale = params.freq_scale * (1.0 - unscaled) + unscaled;
        angles.push_back(std::pow(params.freq_base, exponent) * scale / factor);
    }
    return angles;
}

} // namespace kvg
