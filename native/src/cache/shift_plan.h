// Which cells a K-shift rotates, and how; and which it needn't, because of the frame.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/cells.h"

namespace kvg {

// Waiting cells that carry the same dither.
struct shift_lot {
    uint8_t dither;
    std::vector<cell_span> spans; // runs, to be rotated where they lie
    std::vector<uint32_t> rows;   // the others
};

// Spans begin at multiples of `align`, and there are at most `max_spans`, in all: the longest runs. by_dither: false for a type whose K
// has none, where all are one lot.
std::vector<shift_lot> plan_shift(const cells & cells, bool by_dither, uint32_t align, size_t max_spans);

// The frame of the next K-shift. Cells whose shift is the same can be spared by it: those among which is the one that was rotated most
// often; of several such the most cells. So when some always stay and the others always move, they are rotated by turns, and neither
// without end. The frame stays near 0, as ggml's angles get less exact by 8e-8 a position.
// decoded: positions that are about to be decoded, which must fit it too.
int32_t choose_frame(const cells & cells, const pos_bounds & decoded);

} // namespace kvg
