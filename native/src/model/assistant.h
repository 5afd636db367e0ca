// Assistants: small models that draft for another one. They begin with its hidden states, and attend to its cells.
#pragma once

#include "model/gguf_file.h"
#include "model/hparams.h"

namespace kvg {

// As read_hparams(), with the group of cells and the layer of the target that each layer attends to: its last one with a window, or its
// last one. error(KVG_UNSUPPORTED) for what is no assistant, or one of another model
hparams read_assistant(const gguf_file & file, const hparams & target);

// error(KVG_UNSUPPORTED) for an assistant: it is no model by itself
void require_no_assistant(const gguf_file & file, const hparams & h);

} // namespace kvg
