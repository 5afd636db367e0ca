// What libllama's code for the tokenizers of kinds 'bert', 't5', 'rwkv' and 'plamo2' relies on, beyond what every kind needs.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model/gguf_file.h"

namespace kvg {

// Texts, each with a NUL behind it.
using token_list = std::vector<std::string_view>;

// Whether check_kind() knows the kind.
bool is_checked_kind(const std::string & kind);

// tokens: their texts as libllama will have them. error(KVG_MODEL_LOAD) for what would end the process, read past an array, or take
// hours.
void check_kind(const gguf_file & file, const std::string & kind, const token_list & tokens);

} // namespace kvg
