// A device rotates K by a graph of ggml operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/kv_group.h"
#include "memory/update_graph.h"
#include "shift/rotation.h"

namespace kvg {

// Whether the part's device supports all operations of the graph, and computes each of them in F32 as far as we know. Asks the device
// about the cache's own tensors; they need no memory yet.
bool can_rotate_on_device(const kv_group & group, const kv_part & part, const std::vector<layer_rotation> & layers);
// error(KVG_DEVICE)
update_graph rotation_graph(const kv_group & group, const kv_part & part, const std::vector<layer_rotation> & layers,
                            const rotation_list & list);

// The rows of a layer that one set of graph nodes rotates.
struct rotated_piece {
    bool in_place; // true: neighbouring cells, rotated in the cache. false: any cells, copied as floats and written back
    std::vector<rotated_row> rows; // all with the same dither
};

struct piece_limits {
    bool by_dither;   // false for a type without dither: then cells with different dithers can be in one piece
    uint32_t align;   // a piece in place begins at a multiple of this
    size_t max_spans; // the most pieces in place; the longest runs are taken
    size_t max_rows;  // the most rows of a piece that is not in place
};

// precondition: the list's rows are in rising order
std::vector<rotated_piece> cut_pieces(const rotation_list & list, const piece_limits & limits);

} // namespace kvg
