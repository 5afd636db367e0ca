#include "cpu/codebooks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include <ggml.h>

namespace kvg {

namespace {

constexpr uint32_t BLOCK = 256;
constexpr uint8_t ONE[2] = {0x00, 0x3c}; // as an F16, which blocks begin with

// What ggml makes of blocks with the scale 1, no signs, and one index after the other. set(bytes, i, index) writes index i of a block, whose
// weights are then `unit` times those of the codebook, but for `offset`.
template <class T, size_t N, class F>
void decode(ggml_type type, std::array<T, N> & to, float unit, float offset, int32_t raised, F set) {
    constexpr uint32_t n_weights = sizeof(T);
    constexpr uint32_t n_indices = BLOCK / n_weights;
    std::vector<uint8_t> bytes(ggml_row_size(type, BLOCK));
    std::array<float, BLOCK> weights;
    for (uint32_t first = 0; first < N; first += n_indices) {
        std::fill(bytes.begin(), bytes.end(), uint8_t{0});
        memcpy(bytes.data(), ONE, sizeof(ONE));
        for (uint32_t i = 0; i < n_indices; ++i) {
            set(bytes.data() + sizeof(ONE), i, first + i);
        }
        ggml_get_type_traits(type)->to_float(bytes.data(), weights.data(), BLOCK);
        for (uint32_t i = 0; i < BLOCK; ++i) {
            const auto value = static_cast<uint8_t>(std::lround((weights[i] - offset) / unit) + raised);
            memcpy(reinterpret_cast<uint8_t *>(to.data() + first) + i, &value, 1);
        }
    }
}

// In rising order
template <size_t N> std::vector<uint8_t> different_bytes(const std::array<uint32_t, N> & book) {
    std::set<uint8_t> bytes;
    for (const uint32_t entry : book) {
        for (uint32_t i = 0; i < 4; ++i) {
            bytes.insert(static_cast<uint8_t>(entry >> (8 * i)));
        }
    }
    return {bytes.begin(), bytes.end()};
}

// Four bits for each byte, which bits_of(byte) tells
template <size_t N, class F> std::array<uint16_t, N> fours(const std::array<uint32_t, N> & book, F bits_of) {
    std::array<uint16_t, N> to = {};
    for (size_t index = 0; index < N; ++index) {
        for (uint32_t i = 0; i < 4; ++i) {
            const auto bits = static_cast<uint32_t>(bits_of(static_cast<uint8_t>(book[index] >> (8 * i))));
            to[index] = static_cast<uint16_t>(to[index] | bits << (4 * i));
        }
    }
    return to;
}

codebooks decoded() {
    codebooks all;
    decode(GGML_TYPE_IQ2_XXS, all.iq2_xxs, 0.125f, 0, 64,
           [](uint8_t * bytes, uint32_t i, uint32_t index) { bytes[i / 4 * 8 + i % 4] = static_cast<uint8_t>(index); });
    decode(GGML_TYPE_IQ2_XS, all.iq2_xs, 0.125f, 0, 64, [](uint8_t * bytes, uint32_t i, uint32_t index) {
        bytes[i * 2] = static_cast<uint8_t>(index);
        bytes[i * 2 + 1] = static_cast<uint8_t>(index >> 8);
    });
    decode(GGML_TYPE_IQ2_S, all.iq2_s, 0.125f, 0, 64, [](uint8_t * bytes, uint32_t i, uint32_t index) {
        bytes[i] = static_cast<uint8_t>(index);
        bytes[64 + i / 4] |= static_cast<uint8_t>(index >> 8 << (i % 4 * 2));
    });
    decode(GGML_TYPE_IQ3_XXS, all.iq3_xxs, 0.25f, 0, 64,
           [](uint8_t * bytes, uint32_t i, uint32_t index) { bytes[i] = static_cast<uint8_t>(index); });
    decode(GGML_TYPE_IQ3_S, all.iq3_s, 1, 0, 64, [](uint8_t * bytes, uint32_t i, uint32_t index) {
        bytes[i] = static_cast<uint8_t>(index);
        bytes[64 + i / 8] |= static_cast<uint8_t>(index >> 8 << (i % 8));
    });
    all.iq3_s_fours = fours(all.iq3_s, [](uint8_t size) { return size & 0x0f; });
    const std::vector<uint8_t> sizes = different_bytes(all.iq3_xxs);
    std::copy(sizes.begin(), sizes.end(), all.iq3_xxs_sizes.begin());
    all.iq3_xxs_fours =
        fours(all.iq3_xxs, [&](uint8_t size) { return std::lower_bound(sizes.begin(), sizes.end(), size) - sizes.begin(); });
    decode(GGML_TYPE_IQ1_S, all.iq1, 0.125f, 0.125f, 16, [](uint8_t * bytes, uint32_t i, uint32_t index) {
        bytes[i] = static_cast<uint8_t>(index);
        const uint32_t high = index >> 8 << (i % 4 * 3);
        bytes[32 + i / 4 * 2] |= static_cast<uint8_t>(high);
        bytes[32 + i / 4 * 2 + 1] |= static_cast<uint8_t>(high >> 8);
    });
    return all;
}

} // namespace

const codebooks & all_codebooks() {
    static const codebooks all = decoded();
    return all;
}

} // namespace kvg
