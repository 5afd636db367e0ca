#include "model/charsmap.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace kvg {

namespace {

constexpr size_t MAX_BYTES = 1 << 23;        // real ones have 2^18
constexpr size_t MAX_REPLACEMENT_BYTES = 64; // Unicode's longest takes 33

// A double array: from a place, a byte leads to the node at place ^ byte, which is the byte's own if its low bits say so. See
// Shunsuke Kanda (2018), Space- and Time-Efficient String Dictionaries.
class charsmap {
public:
    charsmap(const uint8_t * data, size_t size) {
        uint32_t n_bytes = 0;
        std::memcpy(&n_bytes, data, sizeof(n_bytes));
        nodes_.resize(n_bytes / sizeof(uint32_t));
        std::memcpy(nodes_.data(), data + sizeof(n_bytes), nodes_.size() * sizeof(uint32_t));
        const auto * texts = reinterpret_cast<const char *>(data) + sizeof(n_bytes) + n_bytes;
        texts_.assign(texts, texts + (size - sizeof(n_bytes) - n_bytes));
    }

    // Every node that some text leads to.
    const char * error() {
        if (nodes_.empty()) {
            return nullptr;
        }
        std::vector<bool> seen(nodes_.size());
        std::vector<size_t> places = {base(nodes_[0])};
        while (!places.empty()) {
            const size_t place = places.back();
            places.pop_back();
            for (size_t byte = 1; byte < 256; ++byte) {
                const size_t i = place ^ byte;
                if (i >= nodes_.size()) {
                    return "leads out of its table";
                }
                if ((nodes_[i] & ((1U << 31) | 0xFF)) != byte || seen[i]) {
                    continue;
                }
                seen[i] = true;
                const size_t next = i ^ base(nodes_[i]);
                const bool is_leaf = ((nodes_[i] >> 8) & 1) != 0;
                if (is_leaf && (next >= nodes_.size() || !has_text(nodes_[next] & ~(1U << 31)))) {
                    return "names a replacement that isn't there, or a very long one";
                }
                places.push_back(next);
            }
        }
        return nullptr;
    }

private:
    static size_t base(uint32_t node) { return (node >> 10) << ((node & (1U << 9)) >> 6); }

    bool has_text(size_t offset) const {
        if (offset >= texts_.size()) {
            return false;
        }
        const size_t n = std::min(texts_.size() - offset, MAX_REPLACEMENT_BYTES + 1);
        return std::memchr(texts_.data() + offset, 0, n) != nullptr;
    }

    std::vector<uint32_t> nodes_;
    std::vector<char> texts_;
};

} // namespace

const char * charsmap_error(const void * data, size_t size) {
    uint32_t n_bytes = 0;
    if (size < sizeof(n_bytes) || size > MAX_BYTES) {
        return "has a size that can't be";
    }
    std::memcpy(&n_bytes, data, sizeof(n_bytes));
    if (n_bytes + sizeof(n_bytes) >= size) {
        return "is shorter than it says";
    }
    return charsmap(static_cast<const uint8_t *>(data), size).error();
}

} // namespace kvg
