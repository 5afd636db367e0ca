#include "graph/shift.h"

#include <algorithm>

#include "cache/shift_plan.h"
#include "device.h"
#include "error.h"
#include "fault.h"
#include "graph/rope.h"

namespace kvg {

namespace {

constexpr size_t MAX_SPANS = 32;              // per layer; keeps the graph small
constexpr uint64_t MAX_SCRATCH = 16ull << 20; // bytes of K as F32 at a time

// The types that rope takes where they lie, by our own table: supports_op says yes to others, which then abort.
bool in_place(ggml_type type) { return type == GGML_TYPE_F32 || type == GGML_TYPE_F16; }

// K by heads, (head_dim, n_head_kv, n), turned by as many positions. Other types go through F32 as whole heads.
// Returns the nodes in the order in which they must run.
std::vector<ggml_tensor *> turn(ggml_context * ctx, ggml_tensor * k, ggml_tensor * by, ggml_tensor * freq_factors,
                                const rope_params & params, const hadamard * rotated) {
    if (in_place(k->type)) {
        return {rope(ctx, k, by, freq_factors, params, true)};
    }
    ggml_tensor * values = ggml_cast(ctx, k, GGML_TYPE_F32);
    // positions turn pairs of dimensions, which a Hadamard matrix has mixed
    ggml_tensor * plain = rotated ? rotated->apply(ctx, values) : values;
    ggml_tensor * turned = rope(ctx, plain, by, freq_factors, params, true);
    ggml_tensor * kept = rotated ? rotated->apply(ctx, turned) : turned;
    return {values, plain, turned, kept, ggml_cpy(ctx, kept, k)};
}
constexpr size_t MAX_TURN_NODES = 5;

// In parts of at most max_cells.
std::vector<cell_span> cut(const std::vector<cell_span> & spans, uint32_t max_cells) {
    std::vector<cell_span> parts;
    for (const cell_span & span : spans) {
        for (uint32_t done = 0; done < span.n; done += max_cells) {
            parts.push_back({span.begin + done, std::min(max_cells, span.n - done)});
        }
    }
    return parts;
}

} // namespace

bool can_shift_on(ggml_backend_dev_t device, const hparams & h, ggml_type type_k) {
    const ggml_context_ptr ctx(ggml_init({16 * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true}));
    ggml_tensor * by = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, MAX_SPAN_ALIGN);
    ggml_tensor * k = ggml_new_tensor_3d(ctx.get(), type_k, h.head_dim, h.n_head_kv, MAX_SPAN_ALIGN);
    const std::vector<ggml_tensor *> nodes = turn(ctx.get(), k, by, nullptr, h.rope, nullptr);
    return std::all_of(nodes.begin(), nodes.end(),
                       [&](ggml_tensor * node) { return ggml_backend_dev_supports_op(device, node); });
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
    const int32_t sign = fault_active("shift-sign") ? -1 : 1;
    const uint32_t align = span_align(ggml_backend_get_device(runner.backend()));
    const uint64_t cell_floats = uint64_t{cache.n_head_kv()} * cache.head_dim() * sizeof(float);
    // whole alignments, so that parts begin where spans may
    const auto max_cells = static_cast<uint32_t>(std::max<uint64_t>(1, MAX_SCRATCH / cell_floats / align)) * align;
    std::vector<cell_span> spans = plan_shift(cache.cells(), align, MAX_SPANS);
    if (!in_place(cache.type_k())) {
        spans = cut(spans, max_cells);
    }
    update_graph graph("shift", spans.size() * cache.n_layer() * MAX_TURN_NODES);
    for (const cell_span & span : spans) {
        std::vector<int32_t> shifts(span.n);
        for (uint32_t i = 0; i < span.n; ++i) {
            shifts[i] = sign * cache.cells().shift(span.begin + i);
        }
        ggml_tensor * by = graph.input(shifts);
        for (uint32_t il = 0; il < cache.n_layer(); ++il) {
            ggml_tensor * k = cache.heads(graph.ctx(), cache.k(il), span.begin, span.n);
            for (ggml_tensor * node : turn(graph.ctx(), k, by, freq_factors, params, cache.hadamard_k())) {
                graph.add(node);
            }
        }
    }
    if (!graph.run(runner)) {
        cache.set_broken();
        fail(KVG_DEVICE, "the K-shift failed half way on %s: K can't be trusted any more; clear() the cache and decode again",
             ggml_backend_name(runner.backend()));
    }
    cache.cells().clear_shifts();
    return n_shifted;
}

} // namespace kvg
