#include "graph/jitter.h"

namespace kvg {

// How far d may go, from end to end: about a step, as a part of the values' root mean square. Of 32 normal numbers the greatest is 2.3
// of that, and their range 4.1. Of floats it is less, since it moves all values alike.
static double width_of(ggml_type type) {
    switch (type) {
    case GGML_TYPE_F16:
        return 0.7 * 0x1p-10;
    case GGML_TYPE_BF16:
        return 0.7 * 0x1p-7;
    case GGML_TYPE_Q8_0:
        return 2.3 / 127;
    case GGML_TYPE_Q5_1:
        return 4.1 / 31;
    case GGML_TYPE_Q5_0:
        return 2.3 / 16;
    case GGML_TYPE_Q4_1:
        return 4.1 / 15;
    case GGML_TYPE_Q4_0:
        return 2.3 / 8;
    default:
        return 0; // F32
    }
}

// d after so many rotations, for a width of 1: evenly spread over [-1/2, 1/2) by Wellons' hash of 32 bits. Not after the first one,
// whose error would be the greater part of the row's.
static double offset_after(uint8_t turns, uint32_t pair) {
    if (turns < 2) {
        return 0;
    }
    uint32_t h = (pair * 256 + turns) * 0x9e3779b9u;
    h = (h ^ (h >> 16)) * 0x21f0aaadu;
    h = (h ^ (h >> 15)) * 0x735a2d97u;
    return static_cast<int32_t>(h ^ (h >> 15)) * 0x1p-32;
}

jitter jitter_after(uint8_t turns, ggml_type type, uint32_t n_pairs) {
    const double width = width_of(type);
    const auto next = static_cast<uint8_t>(turns + 1);
    if (!ggml_is_quantized(type)) {
        return {static_cast<float>((1 + width * offset_after(next, 0)) / (1 + width * offset_after(turns, 0))), {}};
    }
    jitter out = {1.0f, {}};
    for (uint32_t i = 0; i < (turns == 0 ? 0 : n_pairs); ++i) {
        out.angles.push_back(static_cast<float>(width * (offset_after(next, i) - offset_after(turns, i))));
    }
    return out;
}

} // namespace kvg
