// What each token of a micro-batch sees, as attention adds it to the scores.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/cell_order.h"
#include "memory/cells.h"
#include "runtime/batch.h"

namespace kvg {

class seen_mask {
public:
    // tensor: F16 (span.n, n) for the n tokens of the batch from begin on, its columns in this order. It becomes -inf where a token doesn't see
    // a cell of the span, and elsewhere 0, or with tells_distance how far away the cell is, negative, as ggml's ALiBi wants it.
    // precondition: tells_distance is for columns without an order. error(KVG_INTERNAL) unless the tensor is in host memory
    void write(ggml_tensor * tensor, const cells & cells, const batch & batch, uint32_t begin, uint32_t n,
               const cell_span & span, const cell_order & order, bool tells_distance);

private:
    // A cell that some tokens of a run see, and some don't.
    struct differing {
        uint32_t column;
        int32_t pos;
    };

    // Rows of n tokens from begin on, which are in the same sequences.
    void write_rows(ggml_fp16_t * rows, const cells & cells, const batch & batch, uint32_t begin, uint32_t n,
                    const cell_span & span, const cell_order & order);

    void write_distances(ggml_fp16_t * row, const cells & cells, int32_t pos, const cell_span & span) const;

    std::vector<differing> differing_; // scratch, kept
};

} // namespace kvg
