// Dither: a small known error that a K-shift adds to K, so that repeated rounding does not drift.
//
// K that is rotated and rounded many times drifts. A value that changes by less than half a quantization step is rounded back each
// time, and all these errors have the same direction. The same happens when several rotations add up to a full circle. Therefore a row
// that is rotated a second time gets a small error on purpose, a different one each time. The next rotation removes it first. In
// floating point types the row is multiplied by 1 + d. In block types, whose step depends on their range, each pair of dimensions is
// rotated by d radians more. These errors do not add up. But each value lies at another place between two steps each time, so the
// errors of n roundings grow like the square root of n. This is subtractive dither (Roberts, Picture coding using pseudo-random noise,
// 1962).
#pragma once

#include <cstdint>
#include <vector>

#include <ggml.h>

namespace kvg {

// What a rotation does in addition, to replace one dither by another.
struct dither_step {
    float gain;                // the rotated dimensions are multiplied by this
    std::vector<float> angles; // each pair of dimensions is rotated by so many radians more; empty: not at all
};

// from, to: dithers as cell::dither numbers them. n_pairs: pairs of rotated dimensions. error(KVG_INTERNAL) when `type` is not one that
// a cache can have
dither_step step_dither(uint8_t from, uint8_t to, ggml_type type, uint32_t n_pairs);

} // namespace kvg
