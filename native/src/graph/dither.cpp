#include "graph/dither.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvg {

namespace {

// Evenly spread over [-1/2, 1/2): Wellons' hash of 32 bits.
float noise(uint32_t seed, uint32_t i) {
    uint32_t h = seed * 0x9e3779b9u + i;
    h = (h ^ (h >> 16)) * 0x21f0aaadu;
    h = (h ^ (h >> 15)) * 0x735a2d97u;
    return static_cast<float>(static_cast<int32_t>(h ^ (h >> 15))) * 0x1p-32f;
}

// F16 and BF16: the step is the value's own.
void dither_floats(float * x, int64_t n, uint32_t seed, ggml_type type) {
    const float epsilon = type == GGML_TYPE_F16 ? 0x1p-10f : 0x1p-7f;
    const float lowest = type == GGML_TYPE_F16 ? 0x1p-14f : 0x1p-126f; // normal number
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits = 0;
        memcpy(&bits, &x[i], sizeof(bits));
        bits &= 0x7f800000; // the exponent: the greatest power of two that is not above |x|
        float power = 0;
        memcpy(&power, &bits, sizeof(power));
        x[i] += std::max(power, lowest) * epsilon * noise(seed, static_cast<uint32_t>(i));
    }
}

// Blocks: the step is a part of the block's range.
void dither_blocks(float * x, int64_t n, uint32_t seed, ggml_type type) {
    const int64_t block = ggml_blck_size(type);
    const bool offset = type == GGML_TYPE_Q4_1 || type == GGML_TYPE_Q5_1; // of the whole range, else of [-most, most]
    const float n_steps = type == GGML_TYPE_Q8_0   ? 127
                          : type == GGML_TYPE_Q5_0 ? 16
                          : type == GGML_TYPE_Q4_0 ? 8
                          : type == GGML_TYPE_Q5_1 ? 31
                                                   : 15;
    for (int64_t begin = 0; begin < n; begin += block) {
        const auto [low, high] = std::minmax_element(x + begin, x + begin + block);
        const float most = std::max(-*low, *high);
        const float bottom = offset ? *low : -most;
        const float top = offset ? *high : most;
        const float step = (offset ? top - bottom : most) / n_steps;
        for (int64_t i = begin; i < begin + block; ++i) {
            x[i] += step * noise(seed, static_cast<uint32_t>(i));
            if (type != GGML_TYPE_Q8_0) { // whose steps are too small for the range to grow by them
                x[i] = std::min(std::max(x[i], bottom), top);
            }
        }
    }
}

void compute(ggml_tensor * dst, const ggml_tensor *, const ggml_tensor * seeds, int ith, int nth, void * type) {
    const int64_t width = dst->ne[0];
    const auto to = static_cast<ggml_type>(reinterpret_cast<uintptr_t>(type));
    for (int64_t row = ith; row < dst->ne[1]; row += nth) {
        const int32_t seed = static_cast<const int32_t *>(seeds->data)[row];
        float * x = static_cast<float *>(dst->data) + row * width;
        if (seed >= 0 && ggml_is_quantized(to)) {
            dither_blocks(x, width, static_cast<uint32_t>(seed), to);
        } else if (seed >= 0) {
            dither_floats(x, width, static_cast<uint32_t>(seed), to);
        }
    }
}

} // namespace

ggml_tensor * dither(ggml_context * ctx, ggml_tensor * values, ggml_tensor * seeds, ggml_type type) {
    // the type as a pointer: what it pointed to would have to outlive the graph
    return ggml_map_custom2_inplace(ctx, values, seeds, compute, GGML_N_TASKS_MAX,
                                    reinterpret_cast<void *>(static_cast<uintptr_t>(type)));
}

} // namespace kvg
