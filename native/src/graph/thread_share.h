// What one of ggml's threads does of an operation.
#pragma once

#include <cstdint>

namespace kvg {

// [begin, end) of n, in whole pieces of `width`; n is a multiple of it.
struct thread_share {
    uint32_t begin;
    uint32_t end;
    thread_share(uint64_t n, uint32_t width, int ith, int nth) {
        const auto at = [&](int i) {
            return static_cast<uint32_t>(n / width * static_cast<uint64_t>(i) / static_cast<uint64_t>(nth)) * width;
        };
        begin = at(ith);
        end = at(ith + 1);
    }
};

} // namespace kvg
