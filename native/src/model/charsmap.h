// SentencePiece's table of texts to replace before a text is split: whether libllama can walk it with any text.
#pragma once

#include <cstddef>

namespace kvg {

// The reason why not, nullptr if it can. libllama would end the process at an index beyond the table.
const char * charsmap_error(const void * data, size_t size);

} // namespace kvg
