// Rounding of rows. Included behind the vectors of an instruction set.
#include <algorithm>
#include <cmath>

namespace kvg::KVG_PRODUCTS {

namespace {

inline floats size_of(floats x) { return as_floats(reinterpret_cast<words>(x) & 0x7fffffff); }
inline floats greater(floats a, floats b) { return a > b ? a : b; }

// The greatest size of n numbers; NaN if any is.
inline float greatest_size(const float * x, uint32_t n) {
    floats most = {};
    floats any_nan = {};
    for (uint32_t i = 0; i < n; i += LANES) {
        const auto v = load<floats>(x + i);
        most = greater(size_of(v), most);
        any_nan = v == v ? any_nan : v;
    }
    return any(any_nan != any_nan) ? NAN : greatest_of(most);
}

// Their products with `factor` become bytes from -127 to 127, whatever they are.
// @return the sum of n bytes
inline int32_t round_to_bytes(const float * x, float factor, uint8_t * to, uint32_t n) {
    ints sum = {};
    for (uint32_t i = 0; i < n; i += LANES) {
        ints v = rounded(load<floats>(x + i) * factor);
        v = v < -127 ? all(-127) : v;
        v = v > 127 ? all(127) : v;
        sum += v;
        store_bytes(to + i, v);
    }
    return sum_of(sum);
}

inline void round_block(const float * x, uint8_t * numbers, rounded_32 & block) {
    const float most = greatest_size(x, rounded_32::N);
    const float factor = most != 0 ? 127 / most : 0;
    const int32_t half = round_to_bytes(x, factor, numbers, 16);
    const int32_t sum = half + round_to_bytes(x + 16, factor, numbers + 16, 16);
    block.scale = through_half(most / 127); // as ggml keeps it
    block.lift = -128 * sum;
    block.lift_of_half = -128 * half;
    block.total = block.scale * static_cast<float>(sum);
}

// The number that is farthest from 0, the first of them; NaN if any is.
inline float farthest(const float * x) {
    const float size = greatest_size(x, rounded_256::N);
    for (uint32_t i = 0; i < rounded_256::N; i += LANES) {
        if (any(size_of(load<floats>(x + i)) == all(size))) {
            return *std::find_if(x + i, x + i + LANES, [&](float each) { return std::fabs(each) == size; });
        }
    }
    return size;
}

inline void round_block(const float * x, uint8_t * numbers, rounded_256 & block) {
    const float most = farthest(x);
    const float factor = most != 0 ? -127 / most : 0;
    block.scale = most != 0 ? 1 / factor : 0;
    for (uint32_t i = 0; i < 16; ++i) {
        block.sums16[i] = static_cast<int16_t>(round_to_bytes(x + i * 16, factor, numbers + i * 16, 16));
    }
    for (uint32_t i = 0; i < 8; ++i) {
        block.sums32[i] = static_cast<int16_t>(block.sums16[2 * i] + block.sums16[2 * i + 1]);
    }
}

template <class B> void round_part(const float * x, uint8_t * row, uint32_t n, uint32_t begin, uint32_t end) {
    uint8_t * blocks = row + n;
    for (uint32_t b = begin / B::N; b < end / B::N; ++b) {
        B block;
        round_block(x + (b * B::N - begin), row + b * B::N, block);
        store(blocks + b * sizeof(block), block);
    }
}

const row_form by_32 = {row_bytes<rounded_32>, round_part<rounded_32>};
const row_form by_256 = {row_bytes<rounded_256>, round_part<rounded_256>};

} // namespace

} // namespace kvg::KVG_PRODUCTS
