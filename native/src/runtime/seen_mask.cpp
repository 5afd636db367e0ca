#include "runtime/seen_mask.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "error.h"

namespace kvg {

namespace {

const ggml_fp16_t SEEN = ggml_fp32_to_fp16(0.0f);
const ggml_fp16_t HIDDEN = ggml_fp32_to_fp16(-std::numeric_limits<float>::infinity());
constexpr int32_t FARTHEST = 65504; // in F16, where a cell further away would be hidden

struct pos_range {
    int32_t first;
    int32_t last;

    bool has(int32_t pos) const { return first <= pos && pos <= last; }
};

pos_range seen_by(const cells & cells, int32_t pos) { return {cells.first_seen(pos), cells.last_seen(pos)}; }

} // namespace

// The cells are looked at once for all of the tokens: most cells are seen by all or by none, and each token is asked about the others only.
void seen_mask::write_rows(ggml_fp16_t * rows, const cells & cells, const batch & batch, uint32_t begin, uint32_t n,
                           const cell_span & span, const cell_order & order) {
    const seq_set & set = batch.set(begin);
    const pos_range of_first = seen_by(cells, batch.positions()[begin]);
    std::fill_n(rows, span.n, HIDDEN);
    if (const cell_span run = cells.seen_run(set, of_first.first, of_first.last); n == 1 && run.n > 0 && order.empty()) {
        std::fill_n(rows + (run.begin - span.begin), run.n, SEEN); // as nearly every token of a generation
        return;
    }
    pos_range by_any = of_first;
    pos_range by_all = of_first;
    for (uint32_t i = begin + 1; i < begin + n; ++i) {
        const pos_range own = seen_by(cells, batch.positions()[i]);
        by_any = {std::min(by_any.first, own.first), std::max(by_any.last, own.last)};
        by_all = {std::max(by_all.first, own.first), std::min(by_all.last, own.last)};
    }
    differing_.clear();
    for (uint32_t i = 0; i < span.n; ++i) {
        const uint32_t c = span.begin + (order.empty() ? i : order[i]);
        if (c >= cells.n_kv() || !by_any.has(cells.pos(c)) || !cells.meets(c, set)) {
            continue;
        }
        const int32_t pos = cells.pos(c);
        if (by_all.has(pos)) {
            rows[i] = SEEN;
        } else {
            differing_.push_back({i, pos});
        }
    }
    for (uint32_t i = n; i-- > 0;) { // the first row last: the others begin as its copies
        ggml_fp16_t * row = rows + static_cast<size_t>(i) * span.n;
        if (i > 0) {
            std::copy_n(rows, span.n, row);
        }
        const pos_range own = seen_by(cells, batch.positions()[begin + i]);
        for (const differing & cell : differing_) {
            row[cell.column] = own.has(cell.pos) ? SEEN : HIDDEN;
        }
    }
}

void seen_mask::write_distances(ggml_fp16_t * row, const cells & cells, int32_t pos, const cell_span & span) const {
    const uint32_t end = std::min(span.begin + span.n, cells.n_kv());
    for (uint32_t c = span.begin; c < end; ++c) {
        if (row[c - span.begin] == SEEN) {
            const int32_t distance = std::min(std::abs(cells.pos(c) - pos), FARTHEST);
            row[c - span.begin] = ggml_fp32_to_fp16(static_cast<float>(-distance));
        }
    }
}

void seen_mask::write(ggml_tensor * tensor, const cells & cells, const batch & batch, uint32_t begin, uint32_t n,
                      const cell_span & span, const cell_order & order, bool tells_distance) {
    // the scheduler keeps inputs with its last backend, the CPU
    if (!ggml_backend_buffer_is_host(tensor->buffer)) {
        fail(KVG_INTERNAL, "the mask is not in host memory");
    }
    auto * mask = static_cast<ggml_fp16_t *>(tensor->data);
    for (uint32_t i = 0; i < n;) {
        uint32_t n_alike = 1;
        while (i + n_alike < n && batch.set(begin + i + n_alike) == batch.set(begin + i)) {
            ++n_alike;
        }
        write_rows(mask + static_cast<size_t>(i) * span.n, cells, batch, begin + i, n_alike, span, order);
        for (uint32_t k = i; tells_distance && k < i + n_alike; ++k) {
            write_distances(mask + static_cast<size_t>(k) * span.n, cells, batch.positions()[begin + k], span);
        }
        i += n_alike;
    }
}

} // namespace kvg
