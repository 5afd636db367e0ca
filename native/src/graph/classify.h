// A text's scores by the model's classifier, such as how well a document answers a question.
#pragma once

#include <cstdint>

#include <ggml-cpp.h>

#include "model/weights.h"

namespace kvg {

// states: what the states of each of n texts were pooled into, (n, n_embd); scores (n, n_classes).
// error(KVG_UNSUPPORTED) for a model without classifier, error(KVG_DEVICE)
void classify(const model & of, ggml_backend_t cpu, const float * states, uint32_t n, float * scores);

} // namespace kvg
