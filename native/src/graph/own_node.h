// What a node of ours has in its parameters, a custom operation for ggml: the function that computes it, which ggml puts first, and a word
// that the function needs, in bytes that ggml leaves free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <ggml.h>

namespace kvg {

// nullptr: the node isn't a custom operation
inline ggml_custom_op_t function_of(const ggml_tensor * node) {
    ggml_custom_op_t run = nullptr;
    std::memcpy(&run, node->op_params, sizeof(run));
    return node->op == GGML_OP_CUSTOM ? run : nullptr;
}

constexpr size_t OWN_WORD = GGML_MAX_OP_PARAMS - sizeof(uint64_t); // the last one

// Zeros until it is set.
template <class T> T own_word(const ggml_tensor * node) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    T value;
    std::memcpy(&value, reinterpret_cast<const char *>(node->op_params) + OWN_WORD, sizeof(value));
    return value;
}

template <class T> void set_own_word(ggml_tensor * node, T value) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    std::memcpy(reinterpret_cast<char *>(node->op_params) + OWN_WORD, &value, sizeof(value));
}

} // namespace kvg
