#include "shift/by_query.h"

namespace kvg {

static_assert(WAITING_CHUNK == ATTEND_CHUNK, "settle() counts cells by the chunks for which attention rotates queries");

query_rotations::query_rotations(const kv_group & group, const rotation_list & waiting)
    : head_dim_(attend_padded(group.spec().head_dim_k)), tables_(waiting.rotations, GGML_TYPE_F32),
      of_cell_(waiting.rows.empty() ? 0 : group.n_rows()) {
    for (const rotated_row & row : waiting.rows) {
        of_cell_[row.row] = row.index + 1;
    }
}

attend_rotations query_rotations::of(const layer_rotation & how) {
    const float * table = of_cell_.empty() ? nullptr : tables_.of(how);
    return table ? attend_rotations{of_cell_.data(), table, how.heads_of(head_dim_), how.mixed ? how.mixed->size() : 0}
                 : attend_rotations{};
}

} // namespace kvg
