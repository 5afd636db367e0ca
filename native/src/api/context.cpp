// Contexts, plans of what they would take, and decode.
#include <algorithm>
#include <numeric>
#include <vector>

#include "api/handles.h"
#include "api/model.h"
#include "runtime/bounded.h"

using namespace kvg;

kvg_status kvg_context_new(kvg_model * model, const kvg_context_params * params, kvg_context ** out) {
    return guarded([&] {
        need(out, "out") = nullptr;
        const kvg_context_params & p = need_struct(params, "params");
        *out = std::make_unique<kvg_context>(need(model, "model"), p).release();
    });
}

void kvg_context_free(kvg_context * context) { std::unique_ptr<kvg_context>{context}.reset(); }

const kvg_gguf * kvg_context_gguf(const kvg_context * context) { return context ? &context->gguf : nullptr; }

static void fill_part(const std::vector<context_part> & parts, int64_t index, kvg_context_part & out) {
    if (index < 0 || static_cast<size_t>(index) >= parts.size()) {
        fail(KVG_INVALID_ARGUMENT, "no part has index %lld: there are %zu", static_cast<long long>(index), parts.size());
    }
    const context_part & part = parts[static_cast<size_t>(index)];
    out = {sizeof(out),
           ggml_backend_dev_name(part.device),
           part.n_layer,
           part.n_cache,
           part.weight_bytes,
           part.mapped_bytes,
           part.cache_bytes,
           part.compute_bytes,
           part.attention.c_str(),
           part.shift_on_device,
           part.fallbacks.c_str(),
           part.pinned_bytes};
}

int64_t kvg_context_n_parts(kvg_context * context) {
    return context ? static_cast<int64_t>(context->context.parts().size()) : 0;
}

kvg_status kvg_context_get_part(kvg_context * context, int64_t index, kvg_context_part * out) {
    return guarded([&] { fill_part(need(context, "context").context.parts(), index, need_struct(out, "out")); });
}

kvg_status kvg_plan_new(const char * path, const kvg_model_params * model, const kvg_context_params * context,
                        const char * const * adapters, int64_t n_adapters, kvg_plan ** out) {
    return guarded([&] {
        need(out, "out") = nullptr;
        const kvg_context_params & p = need_struct(context, "context");
        const std::shared_ptr<const class model> of = load_model(path, model, loading::measure);
        std::vector<active_adapter> active;
        for (int64_t i = 0; i < n_adapters; ++i) {
            const char * file = (&need(adapters, "adapters"))[i];
            active.push_back({std::make_shared<const adapter>(of, &need(file, "path of an adapter")), 1.0f});
        }
        class context measured(of, p, std::move(active));
        *out = std::make_unique<kvg_plan>(kvg_plan{measured.parts()}).release();
    });
}

void kvg_plan_free(kvg_plan * plan) { std::unique_ptr<kvg_plan>{plan}.reset(); }

int64_t kvg_plan_n_parts(const kvg_plan * plan) { return plan ? static_cast<int64_t>(plan->parts.size()) : 0; }

kvg_status kvg_plan_get_part(const kvg_plan * plan, int64_t index, kvg_context_part * out) {
    return guarded([&] { fill_part(need(plan, "plan").parts, index, need_struct(out, "out")); });
}

double kvg_context_graph_seconds(const kvg_context * context) { return context ? context->context.graph_seconds() : 0.0; }

static const observed_attention & observed_in(const class context & c, int64_t group) {
    const auto last = static_cast<int64_t>(c.cache().groups().size()) - 1;
    const observed_attention & observed = c.observed(static_cast<size_t>(bounded("group", group, 0, last)));
    if (std::accumulate(observed.n_queries.begin(), observed.n_queries.end(), 0.0) == 0.0) {
        fail(KVG_INVALID_ARGUMENT, "the last decode observed no token's attention, or failed: decode(batch, observe=N)");
    }
    return observed;
}

kvg_status kvg_attention(const kvg_context * context, int64_t group, float * out) {
    return guarded([&] {
        const class context & c = need(context, "context").context;
        const observed_attention & observed = observed_in(c, group);
        if (observed.peaks) {
            fail(KVG_INVALID_ARGUMENT, "the last decode observed peaks, which have no mean: attention_of_heads()");
        }
        const double n_queries = std::accumulate(observed.n_queries.begin(), observed.n_queries.end(), 0.0);
        std::vector<double> sums(c.cache().groups()[static_cast<size_t>(group)].cells().size());
        for (size_t row = 0; row < observed.of_head.size(); row += observed.n_rows) {
            for (size_t i = 0; i < sums.size(); ++i) {
                sums[i] += double{observed.of_head[row + i]};
            }
        }
        std::transform(sums.begin(), sums.end(), &need(out, "out"),
                       [&](double sum) { return static_cast<float>(sum / n_queries); });
    });
}

kvg_status kvg_attention_of_heads(const kvg_context * context, int64_t group, float * out) {
    return guarded([&] {
        const class context & c = need(context, "context").context;
        const observed_attention & observed = observed_in(c, group);
        const kv_group & of = c.cache().groups()[static_cast<size_t>(group)];
        float * to = &need(out, "out");
        for (size_t head = 0; head < observed.n_queries.size() * of.spec().n_head_kv; ++head) {
            const double n_queries = observed.peaks ? 1 : observed.n_queries[head / of.spec().n_head_kv] / of.spec().n_head_kv;
            const float * sums = observed.of_head.data() + head * observed.n_rows;
            to = std::transform(sums, sums + of.cells().size(), to,
                                [&](float sum) { return static_cast<float>(double{sum} / n_queries); });
        }
    });
}

// Calls decode(context, output), which returns the rows that it wrote.
template <class F> static kvg_status with_output(kvg_context * context, kvg_output * output, F && decode) {
    return on_context(context, [&](class context & c) {
        if (!output) {
            decode(c, nullptr);
            return;
        }
        kvg_output & out = need_struct(output, "output");
        out.n_written = -1;
        out.n_written = decode(c, &out);
    });
}

kvg_status kvg_decode(kvg_context * context, const kvg_batch * batch, kvg_output * output) {
    return with_output(context, output, [&](class context & c, const kvg_output * out) {
        return c.step().decode(need_struct(batch, "batch"), out);
    });
}

kvg_status kvg_append(kvg_context * context, int64_t seq, int64_t token, kvg_output * output) {
    return with_output(context, output,
                       [&](class context & c, const kvg_output * out) { return c.step().append(seq, token, out); });
}

kvg_status kvg_draft(kvg_context * context, const kvg_draft_request * request, kvg_output * output) {
    return with_output(context, output, [&](class context & c, const kvg_output * out) {
        return c.draft_step().draft(need_struct(request, "request"), out);
    });
}

kvg_status kvg_classify(kvg_context * context, const float * states, int64_t n, float * scores) {
    return on_context(context, [&](class context & c) {
        const auto n_texts = static_cast<uint32_t>(bounded("n", n, 0, INT32_MAX));
        c.classify(&need(states, "states"), n_texts, &need(scores, "scores"));
    });
}

kvg_status kvg_take_spans(kvg_context * context, kvg_span * out, int64_t n, int64_t * n_taken) {
    return on_context(context, [&](class context & c) {
        need(n_taken, "n_taken") = 0;
        if (n < 0) {
            fail(KVG_INVALID_ARGUMENT, "n is %lld", static_cast<long long>(n));
        }
        *n_taken = static_cast<int64_t>(c.trace().take(&need(out, "out"), static_cast<size_t>(n)));
    });
}

kvg_status kvg_undo_decode(kvg_context * context) {
    return on_context(context, [&](class context & c) { c.step().undo(); });
}
