// The tokens of a batch on their way into the cache: all of them, or none.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/cells.h"
#include "runtime/batch.h"

namespace kvg {

// Puts a batch's tokens into cells as its micro-batches are computed, and takes them out again unless all of them were.
class placed_tokens {
public:
    placed_tokens(cells & cells, const std::vector<uint32_t> & slots) : cells_(cells), slots_(slots) {}
    ~placed_tokens() {
        for (size_t i = 0; i < n_ && !kept_; ++i) {
            cells_.drop(slots_[i]);
        }
    }
    placed_tokens(const placed_tokens &) = delete;
    placed_tokens & operator=(const placed_tokens &) = delete;

    void put(const batch & batch, uint32_t begin, uint32_t n) {
        for (uint32_t i = begin; i < begin + n; ++i) {
            cells_.put(slots_[i], batch.positions()[i], batch.set(i));
            ++n_;
        }
    }
    void keep() { kept_ = true; }

private:
    cells & cells_;
    const std::vector<uint32_t> & slots_;
    size_t n_ = 0;
    bool kept_ = false;
};

} // namespace kvg
