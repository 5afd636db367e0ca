#include "graph/shift.h"

#include <algorithm>
#include <optional>

#include "cache/shift_plan.h"
#include "device.h"
#include "error.h"
#include "fault.h"
#include "graph/host_shift.h"
#include "graph/rope.h"

namespace kvg {

namespace {

constexpr size_t MAX_SPANS = 32; // per layer; keeps the graph small

// The types that rope takes where they lie, by our own table: supports_op says yes to others, which then abort.
bool in_place(ggml_type type) { return type == GGML_TYPE_F32 || type == GGML_TYPE_F16; }

// The graphs are one part's share.
update_graph build_in_place(const kv_cache & cache, const kv_part & part, const rotation & how) {
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

// Rows of K, rotated as whole heads in F32 and rounded again. from, to: which ones, I32 and I64. Returns the node to run.
ggml_tensor * rotate_rows(ggml_context * ctx, const kv_cache & cache, ggml_tensor * k, ggml_tensor * from, ggml_tensor * to,
                          ggml_tensor * by, const rotation & how) {
    ggml_tensor * x = ggml_get_rows(ctx, k, from);
    x = ggml_reshape_3d(ctx, x, cache.head_dim(), cache.n_head_kv(), from->ne[0]);
    // positions turn pairs of dimensions, which a Hadamard matrix has mixed
    x = how.mixed ? how.mixed->apply(ctx, x) : x;
    x = rope(ctx, x, by, how.freq_factors, how.params, false);
    x = how.mixed ? how.mixed->apply(ctx, x) : x;
    return ggml_set_rows(ctx, k, ggml_reshape_2d(ctx, x, k->ne[0], from->ne[0]), to);
}

// For types that rope doesn't take where they lie. Only the rows that wait: another one would not come back from F32 as it was, not
// always.
update_graph build_by_rows(const kv_cache & cache, const kv_part & part, const rotation & how) {
    constexpr uint64_t MAX_SCRATCH = 16ull << 20; // bytes of rows in F32 at a time
    constexpr size_t NODES = 6;                   // of rotate_rows, with a view or an input for each
    const uint64_t row_bytes = uint64_t{cache.n_head_kv()} * cache.head_dim() * sizeof(float);
    const auto max_rows = static_cast<uint32_t>(std::max<uint64_t>(1, MAX_SCRATCH / row_bytes));
    const cells & cells = cache.cells();
    const uint32_t n_pieces = (cells.n_shifted() + max_rows - 1) / max_rows;
    update_graph graph("shift", size_t{n_pieces} * part.layers.size() * NODES);
    for (uint32_t i = 0, piece = 0; piece < n_pieces; ++piece) {
        std::vector<int32_t> from, shifts;
        for (; i < cells.n_kv() && from.size() < max_rows; ++i) {
            if (cells.shift(i) != 0) {
                from.push_back(static_cast<int32_t>(i));
                shifts.push_back(shift_of(cells, i));
            }
        }
        ggml_tensor * by = graph.input(shifts);
        ggml_tensor * source = graph.input(from);
        ggml_tensor * target = graph.input(std::vector<int64_t>(from.begin(), from.end()));
        for (uint32_t il : part.layers) {
            graph.add(rotate_rows(graph.ctx(), cache, cache.k(il), source, target, by, how));
        }
    }
    return graph;
}

// Asks with the tensors that will be rotated: they say where they are, or will be.
bool can_rotate(const kv_cache & cache, const kv_part & part, const rotation & how) {
    const ggml_context_ptr owner(ggml_init({32 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, /*no_alloc*/ true}));
    ggml_context * ctx = owner.get();
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_tensor * k = cache.k(part.layers.front());
    ggml_tensor * by = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, MAX_SPAN_ALIGN);
    if (in_place(k->type)) {
        ggml_build_forward_expand(graph,
                                  rope(ctx, cache.heads(ctx, k, 0, MAX_SPAN_ALIGN), by, how.freq_factors, how.params, true));
    } else {
        ggml_tensor * to = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, MAX_SPAN_ALIGN);
        ggml_build_forward_expand(graph, rotate_rows(ctx, cache, k, by, to, by, how));
    }
    return can_run_all(part.device, graph);
}

[[noreturn]] void fail_half_way(const char * who) {
    fail(KVG_DEVICE, "the K-shift failed half way on %s: K can't be trusted any more; clear() the cache and decode again", who);
}

} // namespace

k_shift::k_shift(kv_cache & cache, const hparams & h, const device_freqs & factors) : cache_(cache) {
    for (const kv_part & part : cache.parts()) {
        const auto found = factors.find(part.device);
        const rotation how = {h.rope, found == factors.end() ? nullptr : found->second, part.hadamard_k.get()};
        shares_.push_back({&part, how, is_cpu(part.device) || can_rotate(cache, part, how)});
    }
}

bool k_shift::is_on(ggml_backend_dev_t device) const {
    const auto share = std::find_if(shares_.begin(), shares_.end(), [&](const auto & s) { return s.part->device == device; });
    return share == shares_.end() || share->on_device;
}

// Whether any row is rotated again.
bool k_shift::is_repeated() const {
    const cells & cells = cache_.cells();
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        if (cells.shift(i) != 0 && cells.turned(i)) {
            return true;
        }
    }
    return false;
}

update_graph k_shift::build(const share & s, cpu_rotation * by_cpu) const {
    if (!is_cpu(s.part->device)) {
        return in_place(cache_.type_k()) ? build_in_place(cache_, *s.part, s.how) : build_by_rows(cache_, *s.part, s.how);
    }
    update_graph graph("shift", s.part->layers.size());
    for (uint32_t il : s.part->layers) {
        graph.add(by_cpu->node(graph.ctx(), cache_.k(il)));
    }
    return graph;
}

uint32_t k_shift::run(update_runner & runner, int n_threads) {
    cells & cells = cache_.cells();
    const uint32_t n_shifted = cells.n_shifted();
    if (n_shifted == 0) {
        return 0;
    }
    if (fault_active("shift-skip")) {
        cells.clear_shifts();
        return n_shifted;
    }
    // noise is the CPU's to make, and F32 needs none
    const bool needs_cpu = cache_.type_k() != GGML_TYPE_F32 && is_repeated();
    const auto is_fetched = [&](const share & s) { return !is_cpu(s.part->device) && (needs_cpu || !s.on_device); };
    std::optional<cpu_rotation> by_cpu;
    if (std::any_of(shares_.begin(), shares_.end(), [&](const share & s) { return is_cpu(s.part->device) || is_fetched(s); })) {
        by_cpu.emplace(cache_, shares_.front().how, n_threads); // the same on all devices
    }
    std::vector<update_graph> graphs;
    for (const share & s : shares_) {
        graphs.push_back(is_fetched(s) ? update_graph("shift", 1) : build(s, by_cpu ? &*by_cpu : nullptr));
    }
    allocate_graphs(runner, graphs);
    unfinished_rows rows(cache_);
    if (ggml_backend_t failed = compute_graphs(runner, graphs)) {
        fail_half_way(ggml_backend_name(failed));
    }
    for (const share & s : shares_) {
        if (is_fetched(s) && !shift_on_host(cache_, *s.part, *by_cpu)) {
            fail_half_way(ggml_backend_dev_name(s.part->device));
        }
    }
    rows.done();
    cells.clear_shifts();
    return n_shifted;
}

} // namespace kvg
