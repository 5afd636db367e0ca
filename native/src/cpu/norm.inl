// RMS norms. Part of kernel.inl.

typedef float half_vec __attribute__((vector_size(LANES * 2)));
typedef double double_vec __attribute__((vector_size(LANES * 4)));

float norm_factor(const float * x, uint32_t n, float eps) {
    constexpr uint32_t HALF = LANES / 2;
    constexpr uint32_t SUMS = 4; // which don't wait for each other
    double_vec sums[SUMS] = {};
    uint32_t i = 0;
    for (; i + SUMS * HALF <= n; i += SUMS * HALF) {
#pragma GCC unroll 4
        for (uint32_t k = 0; k < SUMS; ++k) {
            const auto some = load_as<half_vec>(x + i + k * HALF);
            sums[k] += __builtin_convertvector(some * some, double_vec);
        }
    }
    const double_vec all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double sum = 0.0;
    for (uint32_t lane = 0; lane < HALF; ++lane) {
        sum += all[lane];
    }
    for (; i < n; ++i) {
        sum += static_cast<double>(x[i] * x[i]);
    }
    return 1.0f / __builtin_sqrtf(static_cast<float>(sum / n) + eps);
}

void apply_norm(const float * x, const float * weight, float factor, float * out, uint32_t n) {
    for (uint32_t i = 0; i < n; i += LANES) {
        store_part(out, i, n, load_part(x, i, n) * factor * load_part(weight, i, n));
    }
}
