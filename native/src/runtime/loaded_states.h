// Recurrent states that come in with a saved sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "kvgraph.h"
#include "memory/kv_cache.h"

namespace kvg {

// Nothing changes before commit().
class loaded_states {
public:
    // holds: of the checkpoints, in their order. The arguments must outlive this object. error(KVG_INVALID_ARGUMENT)
    loaded_states(kv_cache & cache, int64_t seq, const kvg_kv_state_list & in, const kvg_kv_checkpoint_list & checkpoints,
                  const std::vector<int64_t> & holds);
    loaded_states(const loaded_states &) = delete;
    loaded_states & operator=(const loaded_states &) = delete;
    ~loaded_states();
    uint32_t n_rows() const { return static_cast<uint32_t>(in_.n_rows); }
    // So that commit() can't fail, once the checkpoints with these holds are gone. error(KVG_CACHE_FULL) when there are too few rows
    void reserve(const std::vector<int64_t> & gone);
    // Copies them; the sequences and checkpoints get them. precondition: the sequences that are replaced have no state any more
    void commit();

private:
    void check(uint32_t n_seq_max) const;

    states & states_;
    int64_t seq_; // below 0: all are replaced
    const kvg_kv_state_list & in_;
    const kvg_kv_checkpoint_list & checkpoints_;
    const std::vector<int64_t> & holds_;
    std::vector<uint32_t> rows_;
};

} // namespace kvg
