// How the tokens of a micro-batch go through states on a device, where sequences of one operation are equally long: cut into segments, of
// which those that are as long, and need nothing of each other, make a group.
#pragma once

#include <cstdint>
#include <vector>

namespace kvg {

struct state_group {
    uint32_t n_seqs;
    uint32_t n_tokens; // of each

    bool operator==(const state_group & o) const { return n_seqs == o.n_seqs && n_tokens == o.n_tokens; }
};

struct state_segments {
    std::vector<state_group> groups; // in the order in which they are computed
    std::vector<int32_t> from;       // of each segment, group by group, the row that it begins with
    std::vector<int64_t> to;         // and the row for what it ends with
    std::vector<int32_t> order;      // the micro-batch's tokens, segment by segment

    // whether that is the order of the micro-batch
    bool in_order() const {
        for (size_t i = 0; i < order.size(); ++i) {
            if (order[i] != static_cast<int32_t>(i)) {
                return false;
            }
        }
        return true;
    }
};

} // namespace kvg
