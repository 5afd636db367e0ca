#include "shift/shift_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

namespace kvg {

namespace {

struct run {
    uint8_t dither;
    uint32_t begin;
    uint32_t aligned; // where a span in it would begin
    uint32_t end;

    uint32_t span_size() const { return end - aligned; }
};

std::vector<run> runs_of(const cells & cells, bool by_dither, uint32_t align) {
    std::vector<run> runs;
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        if (cells.shift(i) == 0) {
            continue;
        }
        const uint8_t dither = by_dither ? cells.dither(i) : 0;
        if (runs.empty() || runs.back().end != i || runs.back().dither != dither) {
            runs.push_back({dither, i, (i + align - 1) / align * align, i});
        }
        runs.back().end = i + 1;
    }
    for (run & r : runs) {
        r.aligned = std::min(r.aligned, r.end);
    }
    return runs;
}

// How many cells wait in a chunk for the same shift.
struct alike {
    uint32_t chunk;
    uint32_t n;
};

// Keeps the chunks where they may go on waiting: as many as there can be, the fullest first.
void keep_full(std::vector<alike> & chunks) {
    std::stable_sort(chunks.begin(), chunks.end(), [](const alike & a, const alike & b) { return a.n > b.n; });
    size_t kept = 0;
    uint32_t n = 0;
    while (kept < chunks.size() && n + chunks[kept].n >= (kept + 1) * MIN_WAITING_IN_CHUNK) {
        n += chunks[kept++].n;
    }
    chunks.resize(n < MIN_WAITING ? 0 : kept);
}

} // namespace

std::vector<uint32_t> waiting_cells(const cells & cells) {
    std::vector<uint32_t> out;
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        if (cells.shift(i) != 0) {
            out.push_back(i);
        }
    }
    return out;
}

std::vector<uint32_t> cells_to_rotate(const cells & cells) {
    std::vector<uint32_t> waiting = waiting_cells(cells);
    std::unordered_map<int32_t, std::vector<alike>> all; // by shift, in order of chunks
    for (const uint32_t i : waiting) {
        std::vector<alike> & chunks = all[cells.shift(i)];
        if (chunks.empty() || chunks.back().chunk != i / WAITING_CHUNK) {
            chunks.push_back({i / WAITING_CHUNK, 0});
        }
        ++chunks.back().n;
    }
    std::set<std::pair<int32_t, uint32_t>> full; // shifts and chunks
    for (auto & [shift, chunks] : all) {
        keep_full(chunks);
        for (const alike & those : chunks) {
            full.emplace(shift, those.chunk);
        }
    }
    const auto may_wait = [&](uint32_t i) { return full.count({cells.shift(i), i / WAITING_CHUNK}) > 0; };
    waiting.erase(std::remove_if(waiting.begin(), waiting.end(), may_wait), waiting.end());
    return waiting;
}

std::vector<shift_lot> plan_shift(const cells & cells, bool by_dither, uint32_t align, size_t max_spans) {
    std::vector<run> runs = runs_of(cells, by_dither, align);
    std::stable_sort(runs.begin(), runs.end(), [](const run & a, const run & b) { return a.span_size() > b.span_size(); });
    std::map<uint8_t, shift_lot> lots;
    for (size_t i = 0; i < runs.size(); ++i) {
        const run & r = runs[i];
        shift_lot & lot = lots.try_emplace(r.dither, shift_lot{r.dither, {}, {}}).first->second;
        const bool in_place = i < max_spans && r.span_size() > 0;
        if (in_place) {
            lot.spans.push_back({r.aligned, r.span_size()});
        }
        for (uint32_t row = r.begin; row < (in_place ? r.aligned : r.end); ++row) {
            lot.rows.push_back(row);
        }
    }
    std::vector<shift_lot> out;
    for (auto & [dither, lot] : lots) {
        out.push_back(std::move(lot));
    }
    return out;
}

} // namespace kvg
