#include "graph/rotate.h"

#include <algorithm>

#include "fault.h"
#include "graph/dither.h"
#include "graph/rope.h"

namespace kvg {

uint32_t max_rotated_rows(const kv_cache & cache) {
    constexpr uint64_t MAX_SCRATCH = 16ull << 20; // bytes
    const uint64_t row_bytes = uint64_t{cache.n_head_kv()} * cache.head_dim() * sizeof(float);
    return static_cast<uint32_t>(std::max<uint64_t>(1, MAX_SCRATCH / row_bytes));
}

std::vector<waiting_rows> list_waiting(const kv_cache & cache) {
    const cells & cells = cache.cells();
    const uint32_t max_rows = max_rotated_rows(cache);
    // other noise each time: errors that go to and fro with a cell would else add up
    const uint32_t salt = cells.n_shifts() * 0x9e3779b1u;
    std::vector<waiting_rows> pieces;
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        if (cells.shift(i) == 0) {
            continue;
        }
        if (pieces.empty() || pieces.back().cells.size() == max_rows) {
            pieces.emplace_back();
        }
        waiting_rows & piece = pieces.back();
        piece.cells.push_back(i);
        piece.by.push_back(shift_of(cells, i));
        // the first rounding is as good as it can be; only when they are repeated they can add up
        const uint32_t seed = (static_cast<uint32_t>(cells.pos(i)) ^ salt) & 0x7fffffff;
        piece.seeds.push_back(cells.turned(i) ? static_cast<int32_t>(seed) : -1);
    }
    return pieces;
}

int32_t shift_of(const cells & cells, uint32_t i) { return fault_active("shift-sign") ? -cells.shift(i) : cells.shift(i); }

ggml_tensor * rotate_rows(ggml_context * ctx, ggml_tensor * k, int64_t head_dim, const row_inputs & rows,
                          const rotation & how) {
    ggml_tensor * x = ggml_get_rows(ctx, k, rows.from);
    x = ggml_reshape_3d(ctx, x, head_dim, k->ne[0] / head_dim, rows.from->ne[0]);
    // positions turn pairs of dimensions, which a Hadamard matrix has mixed
    x = how.mixed ? how.mixed->apply(ctx, x) : x;
    x = rope(ctx, x, rows.by, how.freq_factors, how.params, false);
    x = how.mixed ? how.mixed->apply(ctx, x) : x;
    x = ggml_reshape_2d(ctx, x, k->ne[0], rows.from->ne[0]);
    return ggml_set_rows(ctx, k, rows.seeds ? dither(ctx, x, rows.seeds, k->type) : x, rows.to);
}

} // namespace kvg
