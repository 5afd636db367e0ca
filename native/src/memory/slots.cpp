#include "memory/slots.h"

#include <algorithm>

#include "error.h"

namespace kvg {

namespace {

// Among cells [begin, end).
std::vector<cell_span> empty_runs(const cells & cells, uint32_t begin, uint32_t end) {
    std::vector<cell_span> runs;
    const uint32_t n_kv = std::min(end, std::max(begin, cells.n_kv()));
    for (uint32_t i = begin; i < n_kv; ++i) {
        if (!cells.is_empty(i)) {
            if (i > begin) {
                runs.push_back({begin, i - begin});
            }
            begin = i + 1;
        }
    }
    if (end > begin) {
        runs.push_back({begin, end - begin});
    }
    return runs;
}

} // namespace

void require_room(const cells & cells, uint32_t n, const char * what, uint32_t kept) {
    const uint32_t n_free = cells.size() - cells.n_used();
    if (n <= n_free || (cells.reuses() && n <= cells.n_available(kept))) {
        return;
    }
    if (cells.reuses()) {
        fail(KVG_CACHE_FULL,
             "%s needs %u cells in a group with a window, and %u of %u are empty or left behind by their sequences; "
             "remove tokens (kv.seq_rm), release resume points, "
             "or open the context with more checkpoint_cells or with swa_full=True",
             what, n, cells.n_available(kept), cells.size());
    } else {
        fail(KVG_CACHE_FULL,
             "%s needs %u cells and %u of %u are empty; make room (kv.seq_rm, a ContextShift), or use a larger n_ctx", what, n,
             n_free, cells.size());
    }
}

std::vector<uint32_t> empty_cells(const cells & cells, uint32_t begin, uint32_t end, uint32_t n) {
    std::vector<cell_span> runs = empty_runs(cells, begin, end);
    std::stable_sort(runs.begin(), runs.end(), [](const cell_span & a, const cell_span & b) { return a.n > b.n; });
    std::vector<uint32_t> empty;
    empty.reserve(n);
    for (const cell_span & run : runs) {
        for (uint32_t i = 0; i < run.n && empty.size() < n; ++i) {
            empty.push_back(run.begin + i);
        }
    }
    return empty;
}

std::vector<uint32_t> find_slots(cells & cells, uint32_t n, const char * what, uint32_t kept) {
    require_room(cells, n, what, kept);
    cells.make_room(n, kept);
    return empty_cells(cells, 0, cells.n_fresh() > 0 ? cells.n_fresh() : cells.size(), n);
}

} // namespace kvg
