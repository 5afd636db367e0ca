// Vectors of 32-bit lanes, one for each of LANES rows of weights, and what products do with them on any CPU. Included by the file of an
// instruction set, which adds the rest; nowhere else.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/products.h"
#include "cpu/rounded_rows.h"

namespace kvg::KVG_PRODUCTS {

namespace {

typedef float floats __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4))); // bits, or four bytes in each lane
typedef int8_t signed_bytes __attribute__((vector_size(LANES * 4)));
typedef uint8_t unsigned_bytes __attribute__((vector_size(LANES * 4)));
typedef uint32_t sixteen __attribute__((vector_size(16))); // bytes of a row

template <class T> inline T load(const void * from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}
template <class T> inline void store(void * to, T value) { std::memcpy(to, &value, sizeof(T)); }

inline words all(uint32_t word) { return words{} + word; }
inline ints all(int32_t number) { return ints{} + number; }
inline floats all(float number) { return number - floats{}; } // not + 0, which makes 0 of -0
inline words all_bytes(uint8_t byte) { return all(byte * 0x01010101u); }
inline floats as_floats(words bits) { return reinterpret_cast<floats>(bits); }
inline ints as_ints(words bits) { return reinterpret_cast<ints>(bits); }
inline words as_words(ints numbers) { return reinterpret_cast<words>(numbers); }

// Bits of each byte, moved up, or down where `up` is negative.
inline words moved(words v, int up, uint8_t mask) { return (up < 0 ? v >> -up : v << up) & all_bytes(mask); }
// Of each two bytes the lesser
inline words least_bytes(words a, words b) {
    const auto x = reinterpret_cast<unsigned_bytes>(a), y = reinterpret_cast<unsigned_bytes>(b);
    return reinterpret_cast<words>(x < y ? x : y);
}
// All bits of each byte that has a bit of `which`, one of each four bytes
inline words where_bits(words lanes, uint32_t which) {
    const auto bits = reinterpret_cast<signed_bytes>(lanes & all(which));
    return reinterpret_cast<words>(bits == reinterpret_cast<signed_bytes>(all(which)));
}

} // namespace

} // namespace kvg::KVG_PRODUCTS
