// K rotated as a graph of ggml's operations, by devices that do it themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/kv_group.h"
#include "memory/update_graph.h"
#include "shift/rotation.h"

namespace kvg {

// Whether the part's device has all operations of such a graph, and none that is known to be done in less than F32. Asks with the
// cache's tensors, which say where they are, or will be.
bool can_rotate_on_device(const kv_group & group, const kv_part & part, const std::vector<rotation> & layers);
// error(KVG_DEVICE)
update_graph rotation_graph(const kv_group & group, const kv_part & part, const std::vector<rotation> & layers,
                            const turn_list & list);

// What such a graph rotates at a time, in a layer.
struct rotated_piece {
    bool in_place;                // neighbouring cells, where they lie; else any, as rows that are floats on the way
    std::vector<turned_row> rows; // with the same dither
};

struct piece_limits {
    bool by_dither;   // false for a type that has none: cells are neighbours whatever dither they are said to carry
    uint32_t align;   // pieces in place begin at its multiples
    size_t max_spans; // pieces in place: of the longest runs
    size_t max_rows;  // of another piece
};

// precondition: the list's rows rise
std::vector<rotated_piece> cut_pieces(const turn_list & list, const piece_limits & limits);

} // namespace kvg
