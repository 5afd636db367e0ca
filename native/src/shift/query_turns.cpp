#include "shift/query_turns.h"

#include <unordered_map>

#include "model/rope.h"
#include "shift/shift_plan.h"

namespace kvg {

static_assert(WAITING_CHUNK == ATTEND_CHUNK, "what may wait is counted by the chunks that queries turn for");

attend_turns query_turns::list() {
    const class cells & cells = group_.cells();
    if (cells.n_shifted() == 0) {
        return {};
    }
    if (version_ != cells.shift_version()) {
        renew();
        version_ = cells.shift_version();
    }
    return {of_cell_.data(), turns_.data(), head_rotation_of(group_, how_.params, true), how_.mixed ? how_.mixed->size() : 0};
}

void query_turns::renew() {
    const class cells & cells = group_.cells();
    const std::vector<double> angles = rope_angles(how_.freq_factors, how_.params);
    std::unordered_map<int32_t, uint32_t> known; // turns, from 1, of shifts
    of_cell_.assign(group_.n_rows(), 0);
    turns_.clear();
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        if (cells.shift(i) == 0) {
            continue;
        }
        const auto [turn, is_new] = known.try_emplace(cells.shift(i), static_cast<uint32_t>(known.size()) + 1);
        if (is_new) {
            add_turn(turns_, -shift_of(cells, i), angles, {1.0f, {}});
        }
        of_cell_[i] = turn->second;
    }
}

} // namespace kvg
