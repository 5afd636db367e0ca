// The files of a split model: NAME-00001-of-00003.gguf and its fellows.
#pragma once

#include <memory>
#include <vector>

#include "model/gguf_file.h"

namespace kvg {

// Opens and checks parts 2 and up of the model that `first` begins; none when it is whole. error(KVG_MODEL_LOAD) when `first` isn't the
// first part, or a part is missing, damaged, out of place or of another model.
std::vector<std::unique_ptr<const gguf_file>> open_later_parts(const gguf_file & first);

} // namespace kvg
