// What a K-shift does beside rotating, so that rounding again and again doesn't drift.
//
// K that is rotated, rounded, and rotated again drifts: what turns by less than half a step is rounded back each time, and all these
// errors point one way. The same happens where rows come back to where they were, by a whole turn in several steps. So a row is kept
// a little off: floating point numbers times 1 + d, blocks, whose step is a part of their range, turned by d radians, another d for each
// pair after each rotation. The next one takes it back, so that what is off never adds up, but each value falls elsewhere between two steps each
// time, and n roundings come to the square root of n: dither that is subtracted again (Roberts, Picture coding using pseudo-random
// noise, 1962).
#pragma once

#include <cstdint>
#include <vector>

#include <ggml.h>

namespace kvg {

struct jitter {
    float gain;                // the rotated dimensions times this
    std::vector<float> angles; // and each of their pairs turned by so many radians more, none when empty
};

// For the rotation of a row that was rotated so often before (modulo 256). The first one is plain.
jitter jitter_after(uint8_t turns, ggml_type type, uint32_t n_pairs);

} // namespace kvg
