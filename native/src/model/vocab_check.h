// Whether libllama can be given a file's tokenizer: on what it doesn't expect there, it ends the process.
#pragma once

#include <string_view>

#include "model/gguf_file.h"

namespace kvg {

// Checks every key that libllama's vocabulary reads: type, length, and the values that its code relies on. What it refuses by itself and
// in good order (an unknown pre-tokenizer, say) is left to it. error(KVG_UNSUPPORTED) for kinds of tokenizers that we don't use,
// error(KVG_MODEL_LOAD) for the rest.
void check_vocab(const gguf_file & file);

// Whether the bytes are characters, each in its shortest form.
bool is_utf8(std::string_view text);

} // namespace kvg
