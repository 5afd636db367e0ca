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

// Only the rows that wait: another one would not come back from F32 as it was, not always.
update_graph build_by_rows(const kv_cache & cache, const kv_part & part, const rotation & how, bool noisy) {
    const std::vector<waiting_rows> pieces = list_waiting(cache);
    update_graph graph("shift", pieces.size() * part.layers.size() * ROTATE_NODES);
    for (const waiting_rows & piece : pieces) {
        const row_inputs rows = {graph.input(std::vector<int32_t>(piece.cells.begin(), piece.cells.end())),
                                 graph.input(std::vector<int64_t>(piece.cells.begin(), piece.cells.end())),
                                 graph.input(piece.by), noisy ? graph.input(piece.seeds) : nullptr};
        for (uint32_t il : part.layers) {
            graph.add(rotate_rows(graph.ctx(), cache.k(il), cache.head_dim(), rows, how));
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
        ggml_build_forward_expand(graph, rotate_rows(ctx, k, cache.head_dim(), {by, to, by, nullptr}, how));
    }
    return can_run_all(part.device, graph);
}

} // namespace

k_shift::k_shift(kv_cache & cache, const hparams & h, const device_freqs & factors) : cache_(cache) {
    for (const kv_part & part : cache.parts()) {
        const auto found = factors.find(part.device);
        const rotation how = {h.rope, found == factors.end() ? nullptr : found->second, part.hadamard_k.get()};
        shares_.push_back({&part, how, can_rotate(cache, part, how)});
    }
}

bool k_shift::is_on(ggml_backend_dev_t device) const {
    const auto share = std::find_if(shares_.begin(), shares_.end(), [&](const auto & s) { return s.part->device == device; });
    return share == shares_.end() || share->on_device;
}

// Whether any row is rotated again, and repeated roundings must be kept from adding up: by the same angles, or to and fro, the errors
// of one time are those of another, however far it goes.
bool k_shift::needs_noise() const {
    const cells & cells = cache_.cells();
    for (uint32_t i = 0; i < cells.n_kv() && cache_.type_k() != GGML_TYPE_F32; ++i) {
        if (cells.shift(i) != 0 && cells.turned(i)) {
            return true;
        }
    }
    return false;
}

uint32_t k_shift::run(update_runner & runner) {
    cells & cells = cache_.cells();
    const uint32_t n_shifted = cells.n_shifted();
    if (n_shifted == 0) {
        return 0;
    }
    if (fault_active("shift-skip")) {
        cells.clear_shifts();
        return n_shifted;
    }
    const bool noisy = needs_noise();
    std::vector<const kv_part *> for_cpu;
    std::vector<update_graph> graphs;
    for (const share & s : shares_) {
        if (!is_cpu(s.part->device) && (noisy || !s.on_device)) {
            for_cpu.push_back(s.part);
            graphs.emplace_back("shift", 1); // which stays empty
        } else {
            graphs.push_back(in_place(cache_.type_k()) && !noisy ? build_in_place(cache_, *s.part, s.how)
                                                                 : build_by_rows(cache_, *s.part, s.how, noisy));
        }
    }
    std::optional<host_shift> by_cpu;
    if (!for_cpu.empty()) {
        by_cpu.emplace(runner, cache_, shares_.front().how, noisy);
    }
    allocate_graphs(runner, graphs);
    unfinished_rows rows(cache_);
    if (ggml_backend_t failed = compute_graphs(runner, graphs)) {
        fail(KVG_DEVICE, "the K-shift failed half way on %s: K can't be trusted any more; clear() the cache and decode again",
             ggml_backend_name(failed));
    }
    for (const kv_part * part : for_cpu) {
        by_cpu->run(*part);
    }
    rows.done();
    cells.clear_shifts();
    return n_shifted;
}

} // namespace kvg
