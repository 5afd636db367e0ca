// The checkpoints that a batch asks for, inside a text while more of it is decoded. They are the sequences' own when the batch is.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/kv_cache.h"
#include "runtime/batch.h"
#include "runtime/state_step.h"

namespace kvg {

class batch_checkpoints {
public:
    batch_checkpoints(kv_cache & cache, const batch & batch) : cache_(cache), batch_(batch) {}
    batch_checkpoints(const batch_checkpoints &) = delete;
    batch_checkpoints & operator=(const batch_checkpoints &) = delete;
    // Without commit() nothing is held any more.
    ~batch_checkpoints();

    // Holds what they need, once the batch's cells and states are written.
    void hold(const state_step & states);
    // The sequences have them. Nothing here fails.
    void commit();

private:
    kv_cache & cache_;
    const batch & batch_;
    std::vector<checkpoint> held_;
};

} // namespace kvg
