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

// A frame in which cells keep their K that would have to be rotated in the one there is: those that have moved by the same, when they
// are more than all others. K of the others is rotated instead, and that of cells that were not to be rotated at all may be rotated
// as often as the others move: so it is from a kept original, and there must be `room` for as many more of these. Otherwise the frame
// stays; or goes to 0, where it would go too far, as ggml's angles get less exact by 8e-8 a position.
// decoded: positions that are about to be decoded, which must fit it too.
int32_t choose_frame(const cells & cells, const pos_bounds & decoded, uint32_t room);

// Whose originals must be kept if the frame becomes this one.
std::vector<uint32_t> turned_by_frame(const cells & cells, int64_t frame);

} // namespace kvg
