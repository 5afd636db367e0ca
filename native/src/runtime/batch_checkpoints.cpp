#include "runtime/batch_checkpoints.h"

namespace kvg {

batch_checkpoints::~batch_checkpoints() {
    for (const checkpoint & each : held_) {
        cache_.drop_hold(each.hold);
    }
}

void batch_checkpoints::hold(const state_step & states) {
    for (uint32_t i = 0; i < batch_.n_tokens(); ++i) {
        if (batch_.is_checkpoint(i)) {
            each_member(batch_.set(i).data(), batch_.set(i).size(), [&](uint32_t seq) {
                const int32_t next = batch_.positions()[i] + 1;
                held_.push_back({seq, next, -1, 0});
                held_.back().hold = cache_.hold_at(seq, next, states.row_after(i));
            });
        }
    }
    cache_.reserve_checkpoints(held_.size());
}

void batch_checkpoints::commit() {
    for (const checkpoint & each : held_) {
        cache_.add_checkpoint(each.seq, each.p, each.hold);
    }
    held_.clear();
}

} // namespace kvg
