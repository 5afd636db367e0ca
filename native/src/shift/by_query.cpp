#include "shift/by_query.h"

namespace kvg {

static_assert(WAITING_CHUNK == ATTEND_CHUNK, "cells that may wait are counted by the chunks that queries turn for");

query_turns::query_turns(const kv_group & group, const turn_list & waiting)
    : head_dim_(attend_padded(group.spec().head_dim_k)), tables_(waiting.turns, GGML_TYPE_F32),
      of_cell_(waiting.rows.empty() ? 0 : group.n_rows()) {
    for (const turned_row & row : waiting.rows) {
        of_cell_[row.row] = row.turn + 1;
    }
}

attend_turns query_turns::of(const rotation & how) {
    const float * table = of_cell_.empty() ? nullptr : tables_.of(how);
    return table ? attend_turns{of_cell_.data(), table, how.heads_of(head_dim_), how.mixed ? how.mixed->size() : 0}
                 : attend_turns{};
}

} // namespace kvg
