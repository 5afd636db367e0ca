// Recurrent states that come in with a saved sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "kvgraph.h"
#include "memory/kv_cache.h"

namespace kvg {

// Nobody has them before keep(), and without it their rows are free again.
class loaded_states {
public:
    // error(KVG_INVALID_ARGUMENT)
    loaded_states(kv_cache & cache, int64_t seq, const kvg_kv_state_list & in, const kvg_kv_checkpoint_list & checkpoints);
    loaded_states(const loaded_states &) = delete;
    loaded_states & operator=(const loaded_states &) = delete;
    ~loaded_states();
    // Copies them. error(KVG_CACHE_FULL) when there are too few rows. Where no checkpoint comes in, those that are there make way.
    void take();

    // The sequences and checkpoints get them. holds: of the checkpoints, in their order
    void keep(const std::vector<int64_t> & holds);

private:
    void check(int64_t seq, uint32_t n_seq_max) const;

    kv_cache & cache_;
    states & states_;
    const kvg_kv_state_list & in_;
    const kvg_kv_checkpoint_list & checkpoints_;
    std::vector<uint32_t> rows_;
};

} // namespace kvg
