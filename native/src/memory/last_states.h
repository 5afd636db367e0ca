// Hidden states behind the tokens that were decoded last, for a draft head or an assistant: it begins with the one behind the token before.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/cells.h"

namespace kvg {

// A state is found by its token's cell, so that forks, defrag and edits need nothing of their own: a cell that is empty or has other content
// has no state. There is room for the states of some hundred tokens. Older ones are forgotten, and then a draft is less good, and no text
// another one.
class last_states {
public:
    // cells: of the group that keeps every position, or of any where there is none; n_embd: of a state
    last_states(cells & cells, uint32_t n_embd)
        : cells_(cells), n_embd_(n_embd), owners_(ROWS + cells.n_seq_max(), NOBODY), rows_(owners_.size() * n_embd) {}

    // Where the state behind the token in a cell is to be written, in place of the oldest one.
    float * put(uint32_t cell);
    // The state behind the token in a cell; nullptr: it is not known.
    const float * of_cell(uint32_t cell) const;
    // The state behind the token of a sequence at the position before this one; nullptr: it is not known, or there is no such token.
    const float * before(uint32_t seq, int32_t pos) const;
    uint64_t bytes() const { return rows_.size() * sizeof(float) + owners_.size() * sizeof(uint32_t); }

private:
    static constexpr uint32_t ROWS = 256;
    static constexpr uint32_t NOBODY = UINT32_MAX;

    bool is_of(uint32_t row, uint32_t cell) const {
        return owners_[row] == cells_.id(cell) && cells_.state_row(cell) == row + 1;
    }

    cells & cells_;
    uint32_t n_embd_;
    std::vector<uint32_t> owners_; // of each row: cell::id
    std::vector<float> rows_;
    uint32_t next_ = 0;
};

} // namespace kvg
