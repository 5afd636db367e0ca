// A number that a node of ours needs when it runs: the last word of its parameters, which ggml leaves free in operations of others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <ggml.h>

namespace kvg {

constexpr size_t OWN_WORD = GGML_MAX_OP_PARAMS / sizeof(int32_t) - 1;

template <class T> T own_word(const ggml_tensor * node) {
    static_assert(sizeof(T) == sizeof(int32_t));
    T value;
    std::memcpy(&value, node->op_params + OWN_WORD, sizeof(value));
    return value;
}

template <class T> void set_own_word(ggml_tensor * node, T value) {
    static_assert(sizeof(T) == sizeof(int32_t));
    std::memcpy(node->op_params + OWN_WORD, &value, sizeof(value));
}

} // namespace kvg
