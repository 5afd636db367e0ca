// The first look at a GGUF file: its raw directory, before ggml copies it into memory and hides part of it.
#pragma once

#include <cstdint>
#include <string>

namespace kvg {

// Walks header, keys and tensor names of a file of `size` bytes, the first n of which are at `data`. False when these are too few, and the
// file goes on behind them. error(KVG_MODEL_LOAD) for what runs past the end, for names that are empty or there twice, for NUL in any name
// or string (ggml's getters end there), for more of anything than models have.
// Types, shapes and offsets of tensors are left to ggml, which checks them, and to gguf_file.
bool scan_gguf(const std::string & path, const uint8_t * data, uint64_t n, uint64_t size);

} // namespace kvg
