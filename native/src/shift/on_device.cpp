#include "shift/on_device.h"

#include <algorithm>
#include <iterator>
#include <map>

#include "device.h"
#include "host_memory.h"
#include "model/rope.h"
#include "shift/dither.h"

namespace kvg {

namespace {

constexpr size_t MAX_SPANS = 32; // per layer, to keep the graph small

// For these sizes CUDA and Vulkan have an operation for the Hadamard transform. For other sizes they multiply matrices, and CUDA does so
// in TF32. A row that is rotated a hundred times is multiplied two hundred times. In a simulation with TF32, K then had a relative error
// of nearly a tenth.
constexpr uint32_t SMALLEST_TRANSFORM = 64;
constexpr uint32_t LARGEST_TRANSFORM = 512;

// The types for which rope in place works. supports_op() cannot be asked: it accepts other types, for which the device then aborts.
bool is_roped_in_place(ggml_type type) { return type == GGML_TYPE_F32 || type == GGML_TYPE_F16; }

ggml_tensor * rotate_span(ggml_context * ctx, const kv_group & group, ggml_tensor * k, const cell_span & span, ggml_tensor * by,
                          const layer_rotation & how, float gain) {
    return rope(ctx, group.k_heads(ctx, k, span.begin, span.n), by, how.freq_factors, how.rope, true, gain);
}

struct row_inputs {
    ggml_tensor * from;           // I32 (n): rows of K
    ggml_tensor * to;             // I64 (n): the same rows
    ggml_tensor * by;             // I32 (n): positions
    ggml_tensor * ones;           // I32 (n): all 1; nullptr: no dither is added or removed
    ggml_tensor * inverse_angles; // F32 (head_dim / 2): 1 / the angles of dither_step
};

// The nodes of rotate_rows that compute. For each of them update_graph has room for three tensors: the node, views, and the inputs that
// layers share.
constexpr size_t ROW_NODES = 7;

// Copies rows of K as F32, rotates them and writes them back, rounded. Returns the last node.
ggml_tensor * rotate_rows(ggml_context * ctx, const kv_group & group, ggml_tensor * k, const row_inputs & rows,
                          const layer_rotation & how, float gain) {
    ggml_tensor * x = ggml_get_rows(ctx, k, rows.from);
    x = ggml_reshape_3d(ctx, x, group.spec().head_dim_k, group.spec().n_head_kv, rows.from->ne[0]);
    // mixing a second time undoes it: rope rotates pairs of the unmixed dimensions
    x = how.mixed ? how.mixed->apply(ctx, x) : x;
    x = rope(ctx, x, rows.by, how.freq_factors, how.rope, false, gain);
    x = rows.ones ? rotate_pairs(ctx, x, rows.ones, rows.inverse_angles, how.rope) : x;
    x = how.mixed ? how.mixed->apply(ctx, x) : x;
    return ggml_set_rows(ctx, k, ggml_reshape_2d(ctx, x, k->ne[0], rows.from->ne[0]), rows.to);
}

bool can_rotate(ggml_backend_dev_t device, const kv_group & group, ggml_tensor * k, const layer_rotation & how) {
    const ggml_context_ptr owner = new_ggml_context(64 * ggml_tensor_overhead() + ggml_graph_overhead());
    ggml_context * ctx = owner.get();
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_tensor * by = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, MAX_SPAN_ALIGN);
    if (is_roped_in_place(k->type)) {
        ggml_build_forward_expand(graph, rotate_span(ctx, group, k, {0, MAX_SPAN_ALIGN}, by, how, 1.0f));
    }
    const row_inputs rows = {by, ggml_new_tensor_1d(ctx, GGML_TYPE_I64, MAX_SPAN_ALIGN), by, by,
                             ggml_new_tensor_1d(ctx, GGML_TYPE_F32, group.spec().head_dim_k / 2)};
    ggml_build_forward_expand(graph, rotate_rows(ctx, group, k, rows, how, 1.0f));
    return can_run_all(device, graph);
}

uint8_t dither_of(const rotation_list & list, const piece_limits & limits, size_t i) {
    return limits.by_dither ? list.rotations[list.rows[i].index].from : 0;
}

// Neighbouring cells with the same dither. The numbers are indices into a list's rows.
struct run {
    ptrdiff_t begin;
    ptrdiff_t aligned; // where a piece in place would begin
    ptrdiff_t end;
};

// Sorted: the run whose part from `aligned` on is the longest comes first.
std::vector<run> runs_of(const rotation_list & list, const piece_limits & limits) {
    std::vector<run> runs;
    for (size_t i = 0; i < list.rows.size(); ++i) {
        const uint32_t cell = list.rows[i].row;
        const auto at = static_cast<ptrdiff_t>(i);
        if (i == 0 || cell != list.rows[i - 1].row + 1 || dither_of(list, limits, i) != dither_of(list, limits, i - 1)) {
            runs.push_back({at, at + (limits.align - cell % limits.align) % limits.align, at});
        }
        runs.back().end = at + 1;
    }
    for (run & r : runs) {
        r.aligned = std::min(r.aligned, r.end);
    }
    std::stable_sort(runs.begin(), runs.end(),
                     [](const run & a, const run & b) { return a.end - a.aligned > b.end - b.aligned; });
    return runs;
}

// rotated: the layers to rotate
void add_piece(update_graph & graph, const rotated_piece & piece, const kv_group & group, const std::vector<uint32_t> & rotated,
               const std::vector<layer_rotation> & layers, const std::vector<row_rotation> & rotations) {
    std::vector<int32_t> cells, by;
    for (const rotated_row & row : piece.rows) {
        cells.push_back(static_cast<int32_t>(row.row));
        by.push_back(rotations[row.index].by);
    }
    const cell_span span = {piece.rows.front().row, static_cast<uint32_t>(cells.size())};
    const row_rotation & first = rotations[piece.rows.front().index];
    dither_step step = step_dither(first.from, first.to, group.types().k, group.spec().head_dim_k / 2);
    row_inputs in = {};
    in.by = graph.input(by);
    if (!piece.in_place) {
        in.from = graph.input(cells);
        in.to = graph.input(std::vector<int64_t>(cells.begin(), cells.end()));
    }
    if (!step.angles.empty()) { // no angle is 0: two dithers never have the same angle for a pair
        std::transform(step.angles.begin(), step.angles.end(), step.angles.begin(), [](float angle) { return 1 / angle; });
        in.inverse_angles = graph.input(step.angles);
        in.ones = graph.input(std::vector<int32_t>(cells.size(), 1));
    }
    for (const uint32_t il : rotated) {
        graph.add(piece.in_place ? rotate_span(graph.ctx(), group, group.k(il), span, in.by, layers[il], step.gain)
                                 : rotate_rows(graph.ctx(), group, group.k(il), in, layers[il], step.gain));
    }
}

} // namespace

std::vector<rotated_piece> cut_pieces(const rotation_list & list, const piece_limits & limits) {
    const std::vector<run> runs = runs_of(list, limits);
    std::vector<rotated_piece> pieces;
    std::map<uint8_t, std::vector<rotated_row>> rest; // by dither
    for (size_t i = 0; i < runs.size(); ++i) {
        const run & r = runs[i];
        const bool in_place = i < limits.max_spans && r.end > r.aligned;
        const auto rows = list.rows.begin();
        if (in_place) {
            pieces.push_back({true, {rows + r.aligned, rows + r.end}});
        }
        std::vector<rotated_row> & others = rest[dither_of(list, limits, r.begin)];
        others.insert(others.end(), rows + r.begin, rows + (in_place ? r.aligned : r.end));
    }
    for (const auto & [dither, rows] : rest) {
        for (size_t first = 0; first < rows.size(); first += limits.max_rows) {
            const size_t end = std::min(first + limits.max_rows, rows.size());
            pieces.push_back(
                {false, {rows.begin() + static_cast<ptrdiff_t>(first), rows.begin() + static_cast<ptrdiff_t>(end)}});
        }
    }
    return pieces;
}

bool can_rotate_on_device(const kv_group & group, const kv_part & part, const std::vector<layer_rotation> & layers) {
    return std::all_of(part.layers.begin(), part.layers.end(), [&](uint32_t il) {
        const layer_rotation & how = layers[il];
        const uint32_t size = how.mixed ? how.mixed->size() : SMALLEST_TRANSFORM;
        const bool is_fast = size >= SMALLEST_TRANSFORM && size <= LARGEST_TRANSFORM;
        return !how.rotates() || (is_fast && can_rotate(part.device, group, group.k(il), how));
    });
}

update_graph rotation_graph(const kv_group & group, const kv_part & part, const std::vector<layer_rotation> & layers,
                            const rotation_list & list) {
    std::vector<uint32_t> rotated; // layers
    std::copy_if(part.layers.begin(), part.layers.end(), std::back_inserter(rotated),
                 [&](uint32_t il) { return layers[il].rotates(); });
    const size_t row_bytes = size_t{group.spec().n_head_kv} * group.spec().head_dim_k * sizeof(float);
    const std::vector<rotated_piece> pieces = cut_pieces(list, {group.types().k != GGML_TYPE_F32, span_align(part.device),
                                                                is_roped_in_place(group.types().k) ? MAX_SPANS : 0,
                                                                std::max<size_t>(1, MAX_SHIFT_SCRATCH / row_bytes)});
    size_t n_nodes = 0; // of a layer
    for (const rotated_piece & piece : pieces) {
        n_nodes += piece.in_place ? 1 : ROW_NODES;
    }
    update_graph graph("shift", n_nodes * rotated.size());
    if (rotated.empty()) {
        return graph; // not even inputs
    }
    for (const rotated_piece & piece : pieces) {
        add_piece(graph, piece, group, rotated, layers, list.rotations);
    }
    return graph;
}

} // namespace kvg
