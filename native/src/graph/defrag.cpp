#include "graph/defrag.h"

#include <algorithm>

#include "error.h"

namespace kvg {

namespace {

// One ggml_cpy per run and tensor is right for long runs, rows gathered and scattered for short ones. Measured on CPU: about
// 12 us a copy against 1.5 us a gathered row.
constexpr uint32_t LONG_RUN = 8;
constexpr size_t MAX_COPIES = 4096;           // per graph
constexpr uint64_t MAX_SCRATCH = 16ull << 20; // bytes gathered at a time

// A K or V tensor seen as rows of F32 words, so that bytes move unchanged: typed row operations alter NaNs, and would requantize.
// A tensor of its own at the same address, not a view, which would have to keep the type.
ggml_tensor * as_words(ggml_context * ctx, ggml_tensor * rows) {
    ggml_tensor * words =
        ggml_new_tensor_2d(ctx, GGML_TYPE_F32, static_cast<int64_t>(rows->nb[1] / sizeof(float)), rows->ne[1]);
    if (ggml_backend_tensor_alloc(rows->buffer, words, rows->data) != GGML_STATUS_SUCCESS) {
        fail(KVG_DEVICE, "%s: can't alias '%s'", ggml_backend_buffer_name(rows->buffer), rows->name);
    }
    return words;
}

ggml_tensor * rows_view(ggml_context * ctx, ggml_tensor * t, uint32_t begin, uint32_t n) {
    return ggml_view_1d(ctx, t, t->ne[0] * n, t->nb[1] * begin);
}

void copy_runs(update_graph & graph, const kv_cache & cache, const std::vector<cell_run> & runs, bool words) {
    for (ggml_tensor * rows : cache.tensors()) {
        ggml_tensor * t = words ? as_words(graph.ctx(), rows) : rows;
        for (const cell_run & run : runs) {
            graph.add(
                ggml_cpy(graph.ctx(), rows_view(graph.ctx(), t, run.src, run.n), rows_view(graph.ctx(), t, run.dst, run.n)));
        }
    }
}

void gather_runs(update_graph & graph, const kv_cache & cache, const std::vector<cell_run> & runs) {
    std::vector<int32_t> src;
    std::vector<int64_t> dst;
    for (const cell_run & run : runs) {
        for (uint32_t i = 0; i < run.n; ++i) {
            src.push_back(static_cast<int32_t>(run.src + i));
            dst.push_back(run.dst + i);
        }
    }
    ggml_tensor * from = graph.input_i32(std::move(src));
    ggml_tensor * to = graph.input_i64(std::move(dst));
    for (ggml_tensor * rows : cache.tensors()) {
        ggml_tensor * t = as_words(graph.ctx(), rows);
        graph.add(ggml_set_rows(graph.ctx(), t, ggml_get_rows(graph.ctx(), t, from), to));
    }
}

// The first runs of [begin, end) that together hold at most max_cells cells; the last one is cut when it must be.
std::vector<cell_run> take_cells(std::vector<cell_run> & rest, uint64_t max_cells) {
    std::vector<cell_run> taken;
    uint64_t n = 0;
    size_t used = 0;
    for (; used < rest.size() && n < max_cells; ++used) {
        cell_run & run = rest[used];
        const uint32_t part = static_cast<uint32_t>(std::min<uint64_t>(run.n, max_cells - n));
        taken.push_back({run.src, run.dst, part});
        n += part;
        if (part < run.n) {
            run = {run.src + part, run.dst + part, run.n - part};
            break;
        }
    }
    rest.erase(rest.begin(), rest.begin() + static_cast<ptrdiff_t>(used));
    return taken;
}

void run_one(update_runner & runner, kv_cache & cache, const std::vector<cell_run> & runs, bool gather, bool words) {
    const size_t n_tensors = cache.tensors().size();
    update_graph graph("defrag", gather ? 2 * n_tensors + 2 : n_tensors * (runs.size() + 1));
    if (gather) {
        gather_runs(graph, cache, runs);
    } else {
        copy_runs(graph, cache, runs, words);
    }
    if (!graph.run(runner)) {
        // destinations were holes and sources are untouched: what was there is still there
        fail(KVG_DEVICE, "%s failed while moving cells; those moved before are in place, the rest where they were",
             ggml_backend_name(runner.backend()));
    }
    for (const cell_run & run : runs) {
        for (uint32_t i = 0; i < run.n; ++i) {
            cache.cells().move(run.src + i, run.dst + i);
        }
    }
}

} // namespace

uint32_t run_moves(update_runner & runner, kv_cache & cache, const std::vector<cell_run> & plan) {
    uint32_t n_cells = 0;
    for (const cell_run & run : plan) {
        n_cells += run.n;
    }
    uint64_t widest = 0;
    bool words = true;
    for (const ggml_tensor * t : cache.tensors()) {
        widest = std::max<uint64_t>(widest, t->nb[1]);
        words = words && t->nb[1] % sizeof(float) == 0;
    }
    const bool gather = words && n_cells < plan.size() * LONG_RUN;
    std::vector<cell_run> rest = plan;
    while (!rest.empty()) {
        std::vector<cell_run> part;
        if (gather) {
            part = take_cells(rest, std::max<uint64_t>(1, MAX_SCRATCH / widest));
        } else {
            const size_t n = std::min(rest.size(), std::max<size_t>(1, MAX_COPIES / cache.tensors().size()));
            part.assign(rest.begin(), rest.begin() + static_cast<ptrdiff_t>(n));
            rest.erase(rest.begin(), rest.begin() + static_cast<ptrdiff_t>(n));
        }
        run_one(runner, cache, part, gather, words);
    }
    return n_cells;
}

} // namespace kvg
