// Codebooks of types whose weights are indices: ggml keeps them to itself, so they are what it makes of each index.
#pragma once

#include <array>
#include <cstdint>

namespace kvg {

// Bytes of 8 weights, or of 4, for each index. Those of IQ2 and IQ3 are sizes, raised by 64; those of IQ1 are 8 times the weight, raised by 16.
struct codebooks {
    std::array<uint64_t, 256> iq2_xxs;
    std::array<uint64_t, 512> iq2_xs;
    std::array<uint64_t, 1024> iq2_s;
    std::array<uint32_t, 256> iq3_xxs;
    alignas(64) std::array<uint16_t, 256> iq3_xxs_fours; // the number of each size among those below, in 4 bits
    std::array<uint8_t, 16> iq3_xxs_sizes = {};
    std::array<uint32_t, 512> iq3_s;
    alignas(64) std::array<uint16_t, 512> iq3_s_fours; // the same sizes without the 64, in 4 bits each
    std::array<uint64_t, 2048> iq1;                    // of IQ1_S and IQ1_M
};

const codebooks & all_codebooks();

} // namespace kvg
