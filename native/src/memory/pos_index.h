// The cells of a sequence in order of position, kept for the sequences that were asked for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvg {

// The order of a sequence is made when it is first needed. It is extended when a token is appended at the sequence's end. Any other change
// to the sequence discards it. Cells are named by cell::id, which stays the same when a cell's content moves.
class pos_index {
public:
    struct entry {
        int32_t pos;
        uint32_t id;
    };
    using order = std::vector<entry>; // by position

    explicit pos_index(uint32_t n_seq_max) : orders_(n_seq_max), is_known_(n_seq_max, false) {}

    bool is_known(uint32_t seq) const { return is_known_[seq]; }
    const order & of(uint32_t seq) const { return orders_[seq]; }
    // entries: in any order; entries with the same position keep their order
    void set(uint32_t seq, order entries) {
        std::stable_sort(entries.begin(), entries.end(), [](const entry & a, const entry & b) { return a.pos < b.pos; });
        orders_[seq] = std::move(entries);
        is_known_[seq] = true;
    }
    void append(uint32_t seq, int32_t pos, uint32_t id) noexcept {
        if (!is_known_[seq]) {
            return;
        }
        order & known = orders_[seq];
        if (!known.empty() && known.back().pos > pos) {
            return forget(seq);
        }
        try {
            known.push_back({pos, id});
        } catch (...) {
            forget(seq); // no memory: the order is made again when it is needed
        }
    }
    void forget(uint32_t seq) noexcept {
        if (is_known_[seq]) {
            orders_[seq] = {};
            is_known_[seq] = false;
        }
    }

private:
    std::vector<order> orders_;
    std::vector<bool> is_known_;
};

} // namespace kvg
