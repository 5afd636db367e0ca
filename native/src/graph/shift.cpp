#include "graph/shift.h"

#include <algorithm>
#include <optional>

#include "cache/shift_plan.h"
#include "device.h"
#include "error.h"
#include "fault.h"
#include "graph/host_shift.h"
#include "graph/jitter.h"
#include "graph/rope.h"

namespace kvg {

namespace {

constexpr size_t MAX_SPANS = 32;              // per layer; keeps the graph small
constexpr uint64_t MAX_SCRATCH = 16ull << 20; // bytes of rows in F32 at a time

// The types that rope takes where they lie, by our own table: supports_op says yes to others, which then abort.
bool in_place(ggml_type type) { return type == GGML_TYPE_F32 || type == GGML_TYPE_F16; }

ggml_tensor * rotate_span(ggml_context * ctx, const kv_cache & cache, ggml_tensor * k, const cell_span & span, ggml_tensor * by,
                          const rotation & how, float gain) {
    return rope(ctx, cache.heads(ctx, k, span.begin, span.n), by, how.freq_factors, how.params, true, gain);
}

// Rows of K that are rotated as whole heads in F32 and rounded again.
struct row_inputs {
    ggml_tensor * from;           // I32
    ggml_tensor * to;             // the same rows, I64
    ggml_tensor * by;             // I32
    ggml_tensor * ones;           // I32; of the jitter's angles, nullptr for none
    ggml_tensor * inverse_angles; // F32
};
constexpr size_t ROW_NODES = 7; // of rotate_rows

// Returns the node to run.
ggml_tensor * rotate_rows(ggml_context * ctx, const kv_cache & cache, ggml_tensor * k, const row_inputs & rows,
                          const rotation & how, float gain) {
    ggml_tensor * x = ggml_get_rows(ctx, k, rows.from);
    x = ggml_reshape_3d(ctx, x, cache.head_dim(), cache.n_head_kv(), rows.from->ne[0]);
    // positions turn pairs of dimensions, which a Hadamard matrix has mixed
    x = how.mixed ? how.mixed->apply(ctx, x) : x;
    x = rope(ctx, x, rows.by, how.freq_factors, how.params, false, gain);
    x = rows.ones ? turn_pairs(ctx, x, rows.ones, rows.inverse_angles, how.params) : x;
    x = how.mixed ? how.mixed->apply(ctx, x) : x;
    return ggml_set_rows(ctx, k, ggml_reshape_2d(ctx, x, k->ne[0], rows.from->ne[0]), rows.to);
}

// The shifts of a part's share, as inputs.
class shift_builder {
public:
    shift_builder(const kv_cache & cache, const kv_part & part, const rotation & how)
        : cache_(cache), part_(part), how_(how),
          max_rows_(std::max<uint64_t>(1, MAX_SCRATCH / (uint64_t{cache.n_head_kv()} * cache.head_dim() * sizeof(float)))),
          lots_(plan_shift(cache.cells(), span_align(part.device), in_place(cache.type_k()) ? MAX_SPANS : 0)),
          graph_("shift", max_nodes()) {}

    update_graph build() && {
        for (const shift_lot & lot : lots_) {
            const jitter off = jitter_after(lot.turns, cache_.type_k(), static_cast<uint32_t>(how_.params.n_rot) / 2);
            for (const cell_span & span : lot.spans) {
                add_span(span, off.gain);
            }
            for (size_t first = 0; first < lot.rows.size(); first += max_rows_) {
                const auto begin = lot.rows.begin() + static_cast<ptrdiff_t>(first);
                const size_t n = std::min<size_t>(max_rows_, lot.rows.size() - first);
                add_rows(std::vector<int32_t>(begin, begin + static_cast<ptrdiff_t>(n)), off);
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

    void add_span(const cell_span & span, float gain) {
        std::vector<int32_t> shifts(span.n);
        for (uint32_t i = 0; i < span.n; ++i) {
            shifts[i] = shift_of(cache_.cells(), span.begin + i);
        }
        ggml_tensor * by = graph_.input(shifts);
        for (uint32_t il : part_.layers) {
            graph_.add(rotate_span(graph_.ctx(), cache_, cache_.k(il), span, by, how_, gain));
        }
    }

    // Only the rows that wait: another one would not come back from F32 as it was, not always.
    void add_rows(const std::vector<int32_t> & rows, const jitter & off) {
        std::vector<int32_t> shifts;
        for (const int32_t i : rows) {
            shifts.push_back(shift_of(cache_.cells(), static_cast<uint32_t>(i)));
        }
        row_inputs in = {graph_.input(rows), graph_.input(std::vector<int64_t>(rows.begin(), rows.end())), graph_.input(shifts),
                         nullptr, nullptr};
        if (!off.angles.empty()) {
            std::vector<float> inverse(off.angles);
            std::transform(inverse.begin(), inverse.end(), inverse.begin(), [](float angle) { return 1 / angle; });
            in.ones = graph_.input(std::vector<int32_t>(rows.size(), 1));
            in.inverse_angles = graph_.input(inverse);
        }
        for (uint32_t il : part_.layers) {
            graph_.add(rotate_rows(graph_.ctx(), cache_, cache_.k(il), in, how_, off.gain));
        }
    }

    const kv_cache & cache_;
    const kv_part & part_;
    const rotation & how_;
    uint64_t max_rows_;
    std::vector<shift_lot> lots_;
    update_graph graph_;
};

// Asks with the tensors that will be rotated: they say where they are, or will be.
bool can_rotate(const kv_cache & cache, const kv_part & part, const rotation & how) {
    const ggml_context_ptr owner(ggml_init({64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, /*no_alloc*/ true}));
    ggml_context * ctx = owner.get();
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_tensor * k = cache.k(part.layers.front());
    ggml_tensor * by = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, MAX_SPAN_ALIGN);
    if (in_place(k->type)) {
        ggml_build_forward_expand(graph, rotate_span(ctx, cache, k, {0, MAX_SPAN_ALIGN}, by, how, 1.0f));
    }
    const row_inputs rows = {by, ggml_new_tensor_1d(ctx, GGML_TYPE_I64, MAX_SPAN_ALIGN), by, by,
                             ggml_new_tensor_1d(ctx, GGML_TYPE_F32, how.params.n_rot / 2)};
    ggml_build_forward_expand(graph, rotate_rows(ctx, cache, k, rows, how, 1.0f));
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

update_graph k_shift::build(const share & s, cpu_rotation * by_cpu) const {
    if (!is_cpu(s.part->device)) {
        return shift_builder(cache_, *s.part, s.how).build();
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
    const auto is_fetched = [](const share & s) { return !is_cpu(s.part->device) && !s.on_device; };
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
