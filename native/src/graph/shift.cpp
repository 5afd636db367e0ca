#include "graph/shift.h"

#include <algorithm>

#include "cache/hadamard.h"
#include "cache/shift_plan.h"
#include "device.h"
#include "error.h"
#include "fault.h"
#include "graph/dither.h"
#include "graph/rope.h"

namespace kvg {

namespace {

constexpr size_t MAX_SPANS = 32;              // per layer; keeps the graph small
constexpr uint64_t MAX_SCRATCH = 16ull << 20; // bytes of K as F32 at a time
constexpr size_t MAX_ROW_NODES = 6;           // of turn_rows, with a view or an input for each

// The types that rope takes where they lie, by our own table: supports_op says yes to others, which then abort.
bool in_place(ggml_type type) { return type == GGML_TYPE_F32 || type == GGML_TYPE_F16; }

// What a rotation needs to know beside the cells.
struct turning {
    const rope_params & params;
    ggml_tensor * freq_factors;
    const hadamard * rotated;
};

// Rows of K, turned by as many positions as whole heads in F32. seeds: nullptr, or see dither(). Returns the node to run.
ggml_tensor * turn_rows(ggml_context * ctx, ggml_tensor * k, int64_t head_dim, ggml_tensor * from, ggml_tensor * to,
                        ggml_tensor * by, ggml_tensor * seeds, const turning & how) {
    ggml_tensor * before = ggml_get_rows(ctx, k, from);
    ggml_tensor * rows = ggml_reshape_3d(ctx, before, head_dim, k->ne[0] / head_dim, from->ne[0]);
    // positions turn pairs of dimensions, which a Hadamard matrix has mixed
    rows = how.rotated ? how.rotated->apply(ctx, rows) : rows;
    rows = rope(ctx, rows, by, how.freq_factors, how.params, false);
    rows = how.rotated ? how.rotated->apply(ctx, rows) : rows;
    rows = ggml_reshape_2d(ctx, rows, k->ne[0], from->ne[0]);
    return ggml_set_rows(ctx, k, seeds ? dither(ctx, rows, before, seeds, k->type) : rows, to);
}

int32_t shift_of(const cells & cells, uint32_t i) { return fault_active("shift-sign") ? -cells.shift(i) : cells.shift(i); }

// Both are one part's share.
update_graph build_in_place(const kv_cache & cache, const kv_part & part, const turning & how) {
    const std::vector<cell_span> spans = plan_shift(cache.cells(), span_align(part.device), MAX_SPANS);
    update_graph graph("shift", spans.size() * part.layers.size());
    for (const cell_span & span : spans) {
        std::vector<int32_t> shifts(span.n);
        for (uint32_t i = 0; i < span.n; ++i) {
            shifts[i] = shift_of(cache.cells(), span.begin + i);
        }
        ggml_tensor * by = graph.input(shifts);
        for (uint32_t il : part.layers) {
            ggml_tensor * k = cache.heads(graph.ctx(), cache.k(il), span.begin, span.n);
            graph.add(rope(graph.ctx(), k, by, how.freq_factors, how.params, true));
        }
    }
    return graph;
}

// Only the rows that wait: another one would not come back from F32 as it was, not always.
update_graph build_by_rows(const kv_cache & cache, const kv_part & part, const turning & how, bool dithered) {
    const cells & cells = cache.cells();
    const uint64_t row_bytes = uint64_t{cache.n_head_kv()} * cache.head_dim() * sizeof(float);
    const uint32_t max_rows = static_cast<uint32_t>(std::max<uint64_t>(1, MAX_SCRATCH / row_bytes));
    const uint32_t n_pieces = (cells.n_shifted() + max_rows - 1) / max_rows;
    update_graph graph("shift", size_t{n_pieces} * part.layers.size() * MAX_ROW_NODES);
    for (uint32_t i = 0, piece = 0; piece < n_pieces; ++piece) {
        std::vector<int32_t> from, shifts, seeds;
        std::vector<int64_t> to;
        for (; i < cells.n_kv() && from.size() < max_rows; ++i) {
            if (cells.shift(i) != 0) {
                from.push_back(static_cast<int32_t>(i));
                to.push_back(i);
                shifts.push_back(shift_of(cells, i));
                // the first rounding is as good as it can be; only when they are repeated they can add up
                seeds.push_back(cells.turned(i) ? cells.pos(i) : -1);
            }
        }
        ggml_tensor * by = graph.input(shifts);
        ggml_tensor * source = graph.input(from);
        ggml_tensor * target = graph.input(to);
        ggml_tensor * noise = dithered ? graph.input(seeds) : nullptr;
        for (uint32_t il : part.layers) {
            graph.add(turn_rows(graph.ctx(), cache.k(il), cache.head_dim(), source, target, by, noise, how));
        }
    }
    return graph;
}

// Whether the K-shift has to see to it that repeated roundings don't add up. A Hadamard matrix over whole heads does it: the
// dimensions that turn fast make the roundings of all others random.
bool can_drift(const kv_cache & cache) {
    const hadamard * rotated = cache.hadamard_k(0); // layers are alike
    return cache.type_k() != GGML_TYPE_F32 && !(rotated && rotated->size() == cache.head_dim());
}

bool any_turned(const cells & cells) {
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        if (cells.shift(i) != 0 && cells.turned(i)) {
            return true;
        }
    }
    return false;
}

} // namespace

bool can_shift_on(ggml_backend_dev_t device, const hparams & h, ggml_type type_k) {
    const ggml_context_ptr ctx(ggml_init({32 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, /*no_alloc*/ true}));
    const int64_t n = MAX_SPAN_ALIGN;
    const turning how = {h.rope, nullptr, nullptr};
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_tensor * by = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, n);
    if (in_place(type_k)) {
        ggml_tensor * k = ggml_new_tensor_3d(ctx.get(), type_k, h.head_dim, h.n_head_kv, n);
        ggml_build_forward_expand(graph, rope(ctx.get(), k, by, how.freq_factors, how.params, true));
    } else {
        ggml_tensor * k = ggml_new_tensor_2d(ctx.get(), type_k, h.n_embd_kv(), n);
        ggml_tensor * to = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, n);
        ggml_build_forward_expand(graph, turn_rows(ctx.get(), k, h.head_dim, by, to, by, nullptr, how));
    }
    return can_run_all(device, graph);
}

uint32_t run_shift(update_runner & runner, kv_cache & cache, const rope_params & params, const device_freqs & factors) {
    const uint32_t n_shifted = cache.cells().n_shifted();
    if (n_shifted == 0) {
        return 0;
    }
    if (fault_active("shift-skip")) {
        cache.cells().clear_shifts();
        return n_shifted;
    }
    const bool drifts = can_drift(cache) && any_turned(cache.cells());
    std::vector<update_graph> graphs;
    for (const kv_part & part : cache.parts()) {
        const auto found = factors.find(part.device);
        const turning how = {params, found == factors.end() ? nullptr : found->second, part.hadamard_k.get()};
        const bool dithered = drifts && is_cpu(part.device);
        graphs.push_back(in_place(cache.type_k()) && !dithered ? build_in_place(cache, part, how)
                                                               : build_by_rows(cache, part, how, dithered));
    }
    if (ggml_backend_t failed = run_graphs(runner, graphs)) {
        cache.set_broken();
        fail(KVG_DEVICE, "the K-shift failed half way on %s: K can't be trusted any more; clear() the cache and decode again",
             ggml_backend_name(failed));
    }
    cache.cells().clear_shifts();
    return n_shifted;
}

} // namespace kvg
