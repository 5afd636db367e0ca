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

// Both return false when the device failed.
bool run_in_place(update_runner & runner, const kv_cache & cache, const turning & how) {
    const uint32_t align = span_align(ggml_backend_get_device(runner.backend()));
    const std::vector<cell_span> spans = plan_shift(cache.cells(), align, MAX_SPANS);
    update_graph graph("shift", spans.size() * cache.n_layer());
    for (const cell_span & span : spans) {
        std::vector<int32_t> shifts(span.n);
        for (uint32_t i = 0; i < span.n; ++i) {
            shifts[i] = shift_of(cache.cells(), span.begin + i);
        }
        ggml_tensor * by = graph.input(shifts);
        for (uint32_t il = 0; il < cache.n_layer(); ++il) {
            ggml_tensor * k = cache.heads(graph.ctx(), cache.k(il), span.begin, span.n);
            graph.add(rope(graph.ctx(), k, by, how.freq_factors, how.params, true));
        }
    }
    return graph.run(runner);
}

// Only the rows that wait: another one would not come back from F32 as it was, not always.
bool run_by_rows(update_runner & runner, const kv_cache & cache, const turning & how, bool dithered) {
    const cells & cells = cache.cells();
    const uint64_t row_bytes = uint64_t{cache.n_head_kv()} * cache.head_dim() * sizeof(float);
    const uint32_t max_rows = static_cast<uint32_t>(std::max<uint64_t>(1, MAX_SCRATCH / row_bytes));
    const uint32_t n_parts = (cells.n_shifted() + max_rows - 1) / max_rows;
    update_graph graph("shift", size_t{n_parts} * cache.n_layer() * MAX_ROW_NODES);
    for (uint32_t i = 0, part = 0; part < n_parts; ++part) {
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
        for (uint32_t il = 0; il < cache.n_layer(); ++il) {
            graph.add(turn_rows(graph.ctx(), cache.k(il), cache.head_dim(), source, target, by, noise, how));
        }
    }
    return graph.run(runner);
}

// Whether the K-shift has to see to it that repeated roundings don't add up. A Hadamard matrix over whole heads does it: the
// dimensions that turn fast make the roundings of all others random.
bool can_drift(const kv_cache & cache) {
    const hadamard * rotated = cache.hadamard_k();
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
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        if (!ggml_backend_dev_supports_op(device, ggml_graph_node(graph, i))) {
            return false;
        }
    }
    return true;
}

uint32_t run_shift(update_runner & runner, kv_cache & cache, const rope_params & params, ggml_tensor * freq_factors) {
    const uint32_t n_shifted = cache.cells().n_shifted();
    if (n_shifted == 0) {
        return 0;
    }
    if (fault_active("shift-skip")) {
        cache.cells().clear_shifts();
        return n_shifted;
    }
    const turning how = {params, freq_factors, cache.hadamard_k()};
    const bool on_cpu = is_cpu(ggml_backend_get_device(runner.backend()));
    const bool dithered = on_cpu && can_drift(cache) && any_turned(cache.cells());
    const bool done =
        in_place(cache.type_k()) && !dithered ? run_in_place(runner, cache, how) : run_by_rows(runner, cache, how, dithered);
    if (!done) {
        cache.set_broken();
        fail(KVG_DEVICE, "the K-shift failed half way on %s: K can't be trusted any more; clear() the cache and decode again",
             ggml_backend_name(runner.backend()));
    }
    cache.cells().clear_shifts();
    return n_shifted;
}

} // namespace kvg
