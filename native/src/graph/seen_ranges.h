// Where the cells that tokens see are cut, for threads to share them out.
#pragma once

#include <cstdint>
#include <vector>

namespace kvg {

// A range is so many of the cells that a token sees, in their order: which ones doesn't depend on where they are, on other tokens or on
// threads. So what attention adds up, range by range, doesn't either. Ranges grow with the text, so that there are few of them.
class seen_ranges {
public:
    // The length of the first ones: a range is work for each head of K, and of one head there is little.
    static uint32_t shortest(uint32_t n_head_kv) { return n_head_kv == 1 ? 256 : 512; }
    // The greatest number of ranges of a token that sees so many cells.
    static uint32_t count(uint32_t n_seen, uint32_t shortest);

    explicit seen_ranges(uint32_t shortest) : shortest_(shortest) {}

    // mask: F16 (n_kv, n_tokens), -infinity where a token doesn't see a cell
    void find(const uint16_t * mask, uint32_t n_tokens, uint32_t n_kv);
    // of the token that has most of them
    uint32_t n() const { return n_; }
    // Whether most tokens see the same cells, so that these are better read once for many tokens; true where that wasn't looked at.
    bool is_shared() const { return is_shared_; }
    // (n_tokens, n() + 1): each range's first cell; for ranges that a token hasn't, and behind the last one, n_kv. nullptr when n() is 1
    const uint32_t * begins() const { return n_ > 1 ? begins_.data() : nullptr; }

private:
    uint32_t find_of(const uint16_t * mask, uint32_t token, uint32_t n_tokens, uint32_t n_kv);

    uint32_t shortest_;
    uint32_t n_ = 1;
    bool is_shared_ = true;
    std::vector<uint32_t> begins_;
};

} // namespace kvg
