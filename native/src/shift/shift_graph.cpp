#include "shift/shift_graph.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "device.h"
#include "host_memory.h"
#include "model/rope.h"
#include "shift/dither.h"
#include "shift/shift_plan.h"

namespace kvg {

namespace {

constexpr size_t MAX_SPANS = 32; // per layer; keeps the graph small

// CUDA and Vulkan have Hadamard transforms of their own for these sizes. By others they multiply, CUDA in TF32, and a row that is
// turned a hundred times meets two hundred such products: cut to TF32, K would lose nearly a tenth by a simulation.
constexpr uint32_t SMALLEST_TRANSFORM = 64;
constexpr uint32_t LARGEST_TRANSFORM = 512;

// The types that rope takes where they lie, by our own table: supports_op says yes to others, which then abort.
bool in_place(ggml_type type) { return type == GGML_TYPE_F32 || type == GGML_TYPE_F16; }

ggml_tensor * rotate_span(ggml_context * ctx, const kv_group & group, ggml_tensor * k, const cell_span & span, ggml_tensor * by,
                          const rotation & how, float gain) {
    return rope(ctx, group.k_heads(ctx, k, span.begin, span.n), by, how.freq_factors, how.params, true, gain);
}

struct row_inputs {
    ggml_tensor * from;           // I32, rows of K
    ggml_tensor * to;             // the same rows, I64
    ggml_tensor * by;             // I32, positions
    ggml_tensor * ones;           // I32, as many; nullptr: no pair is turned further
    ggml_tensor * inverse_angles; // F32 (n_rot / 2), by how much they are
};

// Nodes of rotate_rows that compute. update_graph has room for three tensors each: views, and the inputs that layers share.
constexpr size_t ROW_NODES = 7;

// Rows of K, rotated as whole heads in F32 and rounded again. Returns the node to run.
ggml_tensor * rotate_rows(ggml_context * ctx, const kv_group & group, ggml_tensor * k, const row_inputs & rows,
                          const rotation & how, float gain) {
    ggml_tensor * x = ggml_get_rows(ctx, k, rows.from);
    x = ggml_reshape_3d(ctx, x, group.spec().head_dim_k, group.spec().n_head_kv, rows.from->ne[0]);
    // positions turn pairs of dimensions, which a Hadamard matrix has mixed
    x = how.mixed ? how.mixed->apply(ctx, x) : x;
    x = rope(ctx, x, rows.by, how.freq_factors, how.params, false, gain);
    x = rows.ones ? turn_pairs(ctx, x, rows.ones, rows.inverse_angles, how.params) : x;
    x = how.mixed ? how.mixed->apply(ctx, x) : x;
    return ggml_set_rows(ctx, k, ggml_reshape_2d(ctx, x, k->ne[0], rows.from->ne[0]), rows.to);
}

class builder {
public:
    builder(const kv_group & group, const kv_part & part, const rotation & how)
        : group_(group), part_(part), how_(how), next_(group.cells().next_dither(waiting_cells(group.cells()))),
          max_rows_(std::max<size_t>(1, MAX_SHIFT_SCRATCH /
                                            (size_t{group.spec().n_head_kv} * group.spec().head_dim_k * sizeof(float)))),
          lots_(plan_shift(group.cells(), group.types().k != GGML_TYPE_F32, span_align(part.device),
                           in_place(group.types().k) ? MAX_SPANS : 0)),
          graph_("shift", max_nodes()) {}

    update_graph build() && {
        const auto n_pairs = static_cast<uint32_t>(how_.params.n_rot) / 2;
        for (const shift_lot & lot : lots_) {
            const dither_step step = step_dither(lot.dither, dither_after(lot.dither, next_), group_.types().k, n_pairs);
            for (const cell_span & span : lot.spans) {
                add_span(span, step.gain);
            }
            for (size_t first = 0; first < lot.rows.size(); first += max_rows_) {
                const auto begin = lot.rows.begin() + static_cast<ptrdiff_t>(first);
                const size_t n = std::min(max_rows_, lot.rows.size() - first);
                add_rows(std::vector<int32_t>(begin, begin + static_cast<ptrdiff_t>(n)), step);
            }
        }
        return std::move(graph_);
    }

private:
    size_t max_nodes() const {
        size_t per_layer = 0;
        for (const shift_lot & lot : lots_) {
            per_layer += lot.spans.size() + (lot.rows.size() + max_rows_ - 1) / max_rows_ * ROW_NODES;
        }
        return per_layer * part_.layers.size();
    }

    ggml_tensor * shifts_of(const std::vector<int32_t> & cells) {
        std::vector<int32_t> shifts(cells.size());
        std::transform(cells.begin(), cells.end(), shifts.begin(),
                       [&](int32_t i) { return shift_of(group_.cells(), static_cast<uint32_t>(i)); });
        return graph_.input(shifts);
    }

    void add_span(const cell_span & span, float gain) {
        std::vector<int32_t> cells(span.n);
        std::iota(cells.begin(), cells.end(), static_cast<int32_t>(span.begin));
        ggml_tensor * by = shifts_of(cells);
        for (uint32_t il : part_.layers) {
            graph_.add(rotate_span(graph_.ctx(), group_, group_.k(il), span, by, how_, gain));
        }
    }

    void add_rows(const std::vector<int32_t> & rows, const dither_step & step) {
        row_inputs in = {graph_.input(rows), graph_.input(std::vector<int64_t>(rows.begin(), rows.end())), shifts_of(rows),
                         nullptr, nullptr};
        if (!step.angles.empty()) {
            std::vector<float> inverse(step.angles); // none is 0: no two dithers of a pair are the same
            std::transform(inverse.begin(), inverse.end(), inverse.begin(), [](float angle) { return 1 / angle; });
            in.ones = graph_.input(std::vector<int32_t>(rows.size(), 1));
            in.inverse_angles = graph_.input(inverse);
        }
        for (uint32_t il : part_.layers) {
            graph_.add(rotate_rows(graph_.ctx(), group_, group_.k(il), in, how_, step.gain));
        }
    }

    const kv_group & group_;
    const kv_part & part_;
    const rotation & how_;
    uint8_t next_;
    size_t max_rows_;
    std::vector<shift_lot> lots_;
    update_graph graph_;
};

} // namespace

bool can_shift(const kv_group & group, const kv_part & part, const rotation & how) {
    if (how.mixed && (how.mixed->size() < SMALLEST_TRANSFORM || how.mixed->size() > LARGEST_TRANSFORM)) {
        return false;
    }
    const ggml_context_ptr owner = new_ggml_context(64 * ggml_tensor_overhead() + ggml_graph_overhead());
    ggml_context * ctx = owner.get();
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_tensor * k = group.k(part.layers.front());
    ggml_tensor * by = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, MAX_SPAN_ALIGN);
    if (in_place(k->type)) {
        ggml_build_forward_expand(graph, rotate_span(ctx, group, k, {0, MAX_SPAN_ALIGN}, by, how, 1.0f));
    }
    const row_inputs rows = {by, ggml_new_tensor_1d(ctx, GGML_TYPE_I64, MAX_SPAN_ALIGN), by, by,
                             ggml_new_tensor_1d(ctx, GGML_TYPE_F32, how.params.n_rot / 2)};
    ggml_build_forward_expand(graph, rotate_rows(ctx, group, k, rows, how, 1.0f));
    return can_run_all(part.device, graph);
}

update_graph shift_graph(const kv_group & group, const kv_part & part, const rotation & how) {
    return builder(group, part, how).build();
}

} // namespace kvg
