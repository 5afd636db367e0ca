// An integer from outside, checked.
#pragma once

#include <cstdint>

#include "error.h"

namespace kvg {

// value, when it is within [lowest, highest]; else error(KVG_INVALID_ARGUMENT), which names it
inline int64_t bounded(const char * name, int64_t value, int64_t lowest, int64_t highest) {
    if (value < lowest || value > highest) {
        fail(KVG_INVALID_ARGUMENT, "%s is %lld, expected %lld to %lld", name, static_cast<long long>(value),
             static_cast<long long>(lowest), static_cast<long long>(highest));
    }
    return value;
}

} // namespace kvg
