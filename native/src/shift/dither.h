// What a K-shift does beside rotating, so that rounding again and again doesn't drift.
//
// K that is rotated, rounded, and rotated again drifts: what turns by less than half a step is rounded back each time, and all these
// errors point one way. The same happens where rows come back to where they were, by a whole turn in several steps. So rows that are
// rotated again are made a little wrong on purpose, another time otherwise, and the next rotation takes that back first: floating
// point numbers are multiplied by 1 + d, and in blocks, whose step is a part of their range, each pair of dimensions is turned by d
// radians. What K is wrong by never adds up, but each value falls elsewhere between two steps each time, and n roundings come to the
// square root of n: dither that is subtracted again (Roberts, Picture coding using pseudo-random noise, 1962).
#pragma once

#include <cstdint>
#include <vector>

#include <ggml.h>

namespace kvg {

// What a rotation does on top.
struct dither_step {
    float gain;                // the rotated dimensions times this
    std::vector<float> angles; // and each of their pairs turned by so many radians more; none when empty
};

// From one dither to the next, as cells number them. n_pairs: of the dimensions that rotate. error(KVG_INTERNAL): no type of a cache
dither_step step_dither(uint8_t from, uint8_t to, ggml_type type, uint32_t n_pairs);

} // namespace kvg
