#include "graph/shift.h"

#include "device.h"
#include "error.h"

namespace kvg {

static constexpr size_t MAX_RUNS = 32; // per layer; keeps the graph small

ggml_tensor * rope(ggml_context * ctx, ggml_tensor * x, ggml_tensor * positions, ggml_tensor * freq_factors,
                   const rope_params & params, bool in_place) {
    const auto apply = in_place ? ggml_rope_ext_inplace : ggml_rope_ext;
    // A pure rotation: no YaRN (ext_factor 0), so attn_factor 1 leaves the norm alone; the betas are then unused.
    return apply(ctx, x, positions, freq_factors, params.n_rot, params.mode, params.n_ctx_orig, params.freq_base,
                 params.freq_scale, /*ext_factor*/ 0.0f, /*attn_factor*/ 1.0f, /*beta_fast*/ 32.0f, /*beta_slow*/ 1.0f);
}

std::vector<cell_span> shift_spans(const cells & cells, uint32_t align, size_t max_runs) {
    std::vector<cell_span> spans;
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        if (cells.shift(i) == 0) {
            continue;
        }
        const uint32_t begin = i / align * align;
        if (!spans.empty() && begin <= spans.back().begin + spans.back().n) {
            spans.back().n = i + 1 - spans.back().begin;
        } else {
            spans.push_back({begin, i + 1 - begin});
        }
    }
    if (spans.size() > max_runs) {
        const uint32_t begin = spans.front().begin;
        return {{begin, spans.back().begin + spans.back().n - begin}};
    }
    return spans;
}

bool can_shift_on(ggml_backend_dev_t device, const kv_cache & cache, const rope_params & params) {
    // our own table first: supports_op says yes to types that then abort
    if (cache.type_k() != GGML_TYPE_F32 && cache.type_k() != GGML_TYPE_F16) {
        return false;
    }
    const ggml_context_ptr ctx(ggml_init({8 * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true}));
    ggml_tensor * shift = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 256);
    ggml_tensor * k = cache.heads(ctx.get(), cache.k(0), 0, 256);
    return ggml_backend_dev_supports_op(device, rope(ctx.get(), k, shift, nullptr, params, true));
}

uint32_t run_shift(update_runner & runner, kv_cache & cache, const rope_params & params, ggml_tensor * freq_factors) {
    const uint32_t n_shifted = cache.cells().n_shifted();
    if (n_shifted == 0) {
        return 0;
    }
    const uint32_t align = span_align(ggml_backend_get_device(runner.backend()));
    const std::vector<cell_span> spans = shift_spans(cache.cells(), align, MAX_RUNS);
    update_graph graph("shift", spans.size() * cache.n_layer());
    for (const cell_span & span : spans) {
        std::vector<int32_t> shifts(span.n);
        for (uint32_t i = 0; i < span.n; ++i) {
            shifts[i] = cache.cells().shift(span.begin + i);
        }
        ggml_tensor * by = graph.input_i32(std::move(shifts));
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
