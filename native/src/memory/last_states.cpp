#include "memory/last_states.h"

namespace kvg {

float * last_states::put(uint32_t cell) {
    const uint32_t row = next_;
    next_ = (next_ + 1) % static_cast<uint32_t>(owners_.size());
    owners_[row] = cells_.id(cell);
    cells_.set_state_row(cell, static_cast<uint16_t>(row + 1));
    return rows_.data() + size_t{row} * n_embd_;
}

const float * last_states::of_cell(uint32_t cell) const {
    const uint32_t row = cells_.state_row(cell);
    return row > 0 && is_of(row - 1, cell) ? rows_.data() + size_t{row - 1} * n_embd_ : nullptr;
}

const float * last_states::before(uint32_t seq, int32_t pos) const {
    for (uint32_t row = 0; row < owners_.size(); ++row) {
        if (owners_[row] == NOBODY) {
            continue;
        }
        const uint32_t cell = cells_.cell_of(owners_[row]);
        if (is_of(row, cell) && cells_.pos(cell) == pos - 1 && cells_.has_seq(cell, seq)) {
            return rows_.data() + size_t{row} * n_embd_;
        }
    }
    return nullptr;
}

} // namespace kvg
