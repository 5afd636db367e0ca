#include "shift/dither.h"

#include "error.h"

namespace kvg {

// The range of d, from its lowest to its highest value. It is about one quantization step, in units of the values' root mean square
// (RMS). Among 32 normal numbers the greatest is 2.3 RMS, and their range is 4.1 RMS. The range is narrower where that is enough,
// because the dither is itself an error: in floats, where it moves all values alike, and in blocks of 4 bits, whose roundings are nearly
// independent without dither.
//
// Saved states hold K with its dither. A change of width or hash needs a new version of docs/state-format.md.
static double width_of(ggml_type type) {
    switch (type) {
    case GGML_TYPE_F32:
        return 0;
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
        return 0.6 * 4.1 / 15;
    case GGML_TYPE_Q4_0:
        return 0.6 * 2.3 / 8;
    default:
        fail(KVG_INTERNAL, "no dither is known for K in %s", ggml_type_name(type));
    }
}

// d for a width of 1, spread evenly over [-1/2, 1/2) by Wellons' 32-bit hash. The hash never maps two inputs to the same value.
static double offset_of(uint8_t dither, uint32_t pair) {
    if (dither < 2) {
        return 0; // at the first rounding a dither would only add error
    }
    uint32_t h = (pair * 256 + dither) * 0x9e3779b9u;
    h = (h ^ (h >> 16)) * 0x21f0aaadu;
    h = (h ^ (h >> 15)) * 0x735a2d97u;
    return static_cast<int32_t>(h ^ (h >> 15)) * 0x1p-32;
}

dither_step step_dither(uint8_t from, uint8_t to, ggml_type type, uint32_t n_pairs) {
    const double width = width_of(type);
    if (from == to || (from < 2 && to < 2)) {
        return {1.0f, {}};
    }
    if (!ggml_is_quantized(type)) {
        return {static_cast<float>((1 + width * offset_of(to, 0)) / (1 + width * offset_of(from, 0))), {}};
    }
    dither_step out = {1.0f, {}};
    for (uint32_t i = 0; i < n_pairs; ++i) {
        out.angles.push_back(static_cast<float>(width * (offset_of(to, i) - offset_of(from, i))));
    }
    return out;
}

} // namespace kvg
