#include "graph/shift.h"

#include "cache/shift_plan.h"
#include "device.h"
#include "error.h"
#include "fault.h"
#include "graph/rope.h"

namespace kvg {

static constexpr size_t MAX_SPANS = 32; // per layer; keeps the graph small

bool can_shift_on(ggml_backend_dev_t device, const kv_cache & cache, const rope_params & params) {
    // our own table first: supports_op says yes to types that then abort
    if (cache.type_k() != GGML_TYPE_F32 && cache.type_k() != GGML_TYPE_F16) {
        return false;
    }
    const ggml_context_ptr ctx(ggml_init({8 * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true}));
    ggml_tensor * shift = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, MAX_SPAN_ALIGN);
    ggml_tensor * k = cache.heads(ctx.get(), cache.k(0), 0, MAX_SPAN_ALIGN);
    return ggml_backend_dev_supports_op(device, rope(ctx.get(), k, shift, nullptr, params, true));
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
    const std::vector<cell_span> spans = plan_shift(cache.cells(), align, MAX_SPANS);
    update_graph graph("shift", spans.size() * cache.n_layer());
    for (const cell_span & span : spans) {
        std::vector<int32_t> shifts(span.n);
        for (uint32_t i = 0; i < span.n; ++i) {
            shifts[i] = sign * cache.cells().shift(span.begin + i);
        }
        ggml_tensor * by = graph.input(shifts);
        for (uint32_t il = 0; il < cache.n_layer(); ++il) {
            ggml_tensor * k = cache.heads(graph.ctx(), cache.k(il), span.begin, span.n);
            graph.add(rope(graph.ctx(), k, by, freq_factors, params, true));
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
