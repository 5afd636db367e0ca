#include "memory/move.h"

#include <algorithm>
#include <utility>

#include "device.h"
#include "error.h"
#include "fault.h"
#include "host_memory.h"
#include "memory/aging.h"
#include "memory/cache_type.h"
#include "memory/words.h"

namespace kvg {

namespace {

// One ggml_cpy per run and tensor is right for long runs, rows gathered and scattered for short ones. Measured on CPU: about
// 12 us a copy against 1.5 us a gathered row.
constexpr size_t LONG_RUN = 8;
constexpr size_t MAX_COPIES = 4096; // per graph

std::vector<cell_run> to_runs(const std::vector<cell_move> & moves) {
    std::vector<cell_run> runs;
    for (const cell_move & m : moves) {
        if (!runs.empty() && runs.back().src + runs.back().n == m.src && runs.back().dst + runs.back().n == m.dst) {
            ++runs.back().n;
        } else {
            runs.push_back({m.src, m.dst, 1});
        }
    }
    return runs;
}

// Where n rows are read from; a fault for tests reads them one row too far, as far as there are rows.
uint32_t read_from(const kv_group & group, uint32_t src, uint32_t n) {
    return fault_active("defrag-source") ? std::min(src + 1, group.n_rows() - n) : src;
}

bool all_have_words(const kv_group & group) {
    return std::all_of(group.parts().begin(), group.parts().end(),
                       [](const kv_part & part) { return has_words(part.tensors.front()) && has_words(part.tensors.back()); });
}

// nullptr, or the backend that failed.
ggml_backend_t copy_runs(kv_group & group, const char * what, const std::vector<cell_run> & runs) {
    std::vector<update_graph> graphs;
    for (const kv_part & part : group.parts()) {
        update_graph & graph = graphs.emplace_back(what, part.tensors.size() * (runs.size() + 2));
        for (ggml_tensor * rows : part.tensors) {
            ggml_tensor * t = as_words(graph.ctx(), rows);
            for (const cell_run & run : runs) {
                graph.add(ggml_cpy(graph.ctx(), rows_view(graph.ctx(), t, read_from(group, run.src, run.n), run.n),
                                   rows_view(graph.ctx(), t, run.dst, run.n)));
            }
        }
    }
    return run_graphs(group, graphs);
}

// All moves at once: each tensor's rows are gathered before any is scattered, so they may form cycles. nullptr, or the backend that
// failed.
ggml_backend_t gather_rows(kv_group & group, const char * what, const std::vector<cell_move> & moves) {
    std::vector<int32_t> src;
    std::vector<int64_t> dst;
    for (const cell_move & m : moves) {
        src.push_back(static_cast<int32_t>(read_from(group, m.src, 1)));
        dst.push_back(m.dst);
    }
    std::vector<update_graph> graphs;
    for (const kv_part & part : group.parts()) {
        update_graph & graph = graphs.emplace_back(what, 3 * part.tensors.size() + 2);
        ggml_tensor * from = graph.input(src);
        ggml_tensor * to = graph.input(dst);
        for (ggml_tensor * rows : part.tensors) {
            ggml_tensor * t = as_words(graph.ctx(), rows);
            graph.add(ggml_set_rows(graph.ctx(), t, ggml_get_rows(graph.ctx(), t, from), to));
        }
    }
    return run_graphs(group, graphs);
}

// Runs of one tensor's rows, out of the way and then to where they go.
void add_apart(update_graph & graph, const kv_group & group, ggml_tensor * rows, const std::vector<cell_run> & runs) {
    ggml_tensor * t = as_words(graph.ctx(), rows);
    std::vector<ggml_tensor *> apart;
    for (const cell_run & run : runs) {
        apart.push_back(ggml_cont(graph.ctx(), rows_view(graph.ctx(), t, read_from(group, run.src, run.n), run.n)));
        graph.add(apart.back());
    }
    for (size_t i = 0; i < runs.size(); ++i) {
        graph.add(ggml_cpy(graph.ctx(), apart[i], rows_view(graph.ctx(), t, runs[i].dst, runs[i].n)));
    }
}

// The same for rows that can only be copied: by runs, a graph for each tensor of a part.
ggml_backend_t copy_apart(kv_group & group, const char * what, const std::vector<cell_move> & moves) {
    const std::vector<cell_run> runs = to_runs(moves);
    for (size_t i = 0; i < 2 * group.layers().size(); ++i) {
        std::vector<update_graph> graphs;
        for (const kv_part & part : group.parts()) {
            update_graph & graph = graphs.emplace_back(what, 2 * runs.size() + 2);
            if (i < part.tensors.size()) {
                add_apart(graph, group, part.tensors[i], runs);
            }
        }
        if (ggml_backend_t failed = run_graphs(group, graphs)) {
            return failed;
        }
    }
    return nullptr;
}

[[noreturn]] void fail_moving(ggml_backend_t failed, const char * rest) {
    fail(KVG_DEVICE, "%s failed while moving cells; %s", ggml_backend_name(failed), rest);
}

// In order, as parts of at most max_moves moves and max_runs runs.
std::vector<std::vector<cell_move>> split(const std::vector<cell_move> & moves, size_t max_moves, size_t max_runs) {
    std::vector<std::vector<cell_move>> parts;
    size_t n_runs = 0;
    for (size_t i = 0; i < moves.size(); ++i) {
        const bool goes_on = i > 0 && moves[i].src == moves[i - 1].src + 1 && moves[i].dst == moves[i - 1].dst + 1;
        n_runs += !goes_on;
        if (parts.empty() || parts.back().size() == max_moves || n_runs > max_runs) {
            parts.emplace_back();
            n_runs = 1;
        }
        parts.back().push_back(moves[i]);
    }
    return parts;
}

// Moves into holes, calling done(part) after each graph. Sources stay untouched, so a graph that fails has changed nothing that
// counts; `rest` says what became of the graphs before it.
template <class F>
void into_holes(kv_group & group, const char * what, const std::vector<cell_move> & moves, F done, const char * rest) {
    if (group.ages()) {
        move_rows(group, moves);
        done(moves);
        return;
    }
    const bool gather = all_have_words(group) && moves.size() < to_runs(moves).size() * LONG_RUN;
    const size_t max_moves = gather ? max_gathered(group) : moves.size();
    const size_t max_runs = gather ? max_moves : std::max<size_t>(1, MAX_COPIES / (2 * group.layers().size() + 1));
    for (const std::vector<cell_move> & part : split(moves, max_moves, max_runs)) {
        ggml_backend_t failed = gather ? gather_rows(group, what, part) : copy_runs(group, what, to_runs(part));
        if (failed) {
            fail_moving(failed, rest);
        }
        done(part);
    }
}

// The cells follow rows that were moved in place; those that can't have other cells' rows.
void follow_rows(kv_group & group, const std::vector<cell_move> & moves) {
    try {
        fault_point("defrag-cells");
        group.cells().move(moves);
    } catch (...) {
        group.set_broken();
        throw;
    }
}

} // namespace

bool can_keep_on(ggml_backend_dev_t device, const group_spec & spec, const cache_types & types) {
    const ggml_context_ptr owner = new_ggml_context(64 * ggml_tensor_overhead());
    ggml_context * ctx = owner.get();
    ggml_tensor * from = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 8);
    ggml_tensor * to = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 8);
    const std::pair<ggml_type, uint32_t> kinds[] = {{types.k, spec.k_width()}, {types.v, spec.v_width()}};
    for (const auto & [type, width] : kinds) {
        if (width == 0) {
            continue;
        }
        if (is_rpc(device) && !is_common(type)) {
            return false; // it says yes to all, and its server would end where that is not true
        }
        ggml_tensor * fresh = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, width, 8);
        ggml_tensor * rows = ggml_new_tensor_2d(ctx, type, width, MAX_SPAN_ALIGN);
        std::vector<ggml_tensor *> ops = {ggml_set_rows(ctx, rows, fresh, to)};
        ggml_tensor * t = rows;
        if (has_words(rows)) {
            t = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, static_cast<int64_t>(rows->nb[1] / sizeof(float)), rows->ne[1]);
            ops.push_back(ggml_get_rows(ctx, t, from));
            ops.push_back(ggml_set_rows(ctx, t, ops.back(), to));
        } else if (!is_cpu(device)) {
            return false; // Vulkan copies from and to whole words, wherever a view begins
        } else {
            ops.push_back(ggml_cont(ctx, rows_view(ctx, t, 0, 8)));
        }
        ops.push_back(ggml_cpy(ctx, rows_view(ctx, t, 0, 8), rows_view(ctx, t, 8, 8)));
        for (const ggml_tensor * op : ops) {
            if (!can_run(device, op)) {
                return false;
            }
        }
    }
    return true;
}

void run_fill(kv_group & group, const std::vector<cell_move> & moves) {
    const auto follow = [&](const std::vector<cell_move> & part) { group.cells().move(part); };
    into_holes(group, "defrag", moves, follow, "those moved before are in place, the rest where they were");
}

void run_copy(kv_group & group, const std::vector<cell_move> & moves) {
    const auto nothing = [](const std::vector<cell_move> &) {};
    into_holes(group, "copy", moves, nothing, "they are copied before they change, so nothing has changed");
}

void run_aging(kv_group & group, const std::vector<cell_move> & moves) {
    move_rows(group, moves);
    group.cells().move(moves);
}

uint32_t sort_ranks(const kv_group & group) { return std::max<uint32_t>(1, max_gathered(group) / 2); }

void run_sort(kv_group & group, const std::vector<std::vector<cell_move>> & steps) {
    for (const std::vector<cell_move> & step : steps) {
        if (group.ages()) {
            move_rows(group, step);
        } else if (ggml_backend_t failed = (all_have_words(group) ? gather_rows : copy_apart)(group, "defrag", step)) {
            group.set_broken();
            fail_moving(failed, "K and V can't be trusted any more: clear() the cache and decode again");
        }
        follow_rows(group, step);
    }
}

} // namespace kvg
