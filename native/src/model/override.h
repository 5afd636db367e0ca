// Values of keys in place of a file's own.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include <ggml-cpp.h>

namespace kvg {

struct key_override {
    std::string key;
    std::variant<int64_t, double, bool, std::string> value;
};

// Sets the key, which has the file's own type then if the value fits into it. path: for messages
// error(KVG_INVALID_ARGUMENT) when the file has another type there, or an array, and for a key that says how the file is built
void apply_override(gguf_context * meta, const std::string & path, const key_override & wanted);

} // namespace kvg
