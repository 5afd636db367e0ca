// What a file is that is no GGUF: people get other files in a model's place.
#pragma once

#include <cstdint>
#include <string>

namespace kvg {

// What the first bytes tell, and what to do: "is a Git LFS pointer, ...". Empty for what nobody knows.
std::string tell_file_kind(const uint8_t * data, uint64_t size);

} // namespace kvg
