// Host memory that ends after so many allocations. It replaces operator new: one source file of a program includes it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace kvg {

inline int64_t allowed = -1; // allocations until one fails; negative: no end

// Whether the call gets along with n allocations.
template <class F> bool done_with(int64_t n, F call) {
    allowed = n;
    try {
        call();
        allowed = -1;
        return true;
    } catch (const std::bad_alloc &) {
        allowed = -1;
        return false;
    }
}

} // namespace kvg

// not inlined: gcc would see malloc and free, and take them for a mismatch
__attribute__((noinline)) void * operator new(std::size_t size) {
    if (kvg::allowed == 0) {
        throw std::bad_alloc();
    }
    kvg::allowed -= kvg::allowed > 0;
    if (void * memory = malloc(size)) {
        return memory;
    }
    throw std::bad_alloc();
}

__attribute__((noinline)) void operator delete(void * memory) noexcept { free(memory); }
__attribute__((noinline)) void operator delete(void * memory, std::size_t) noexcept { free(memory); }
