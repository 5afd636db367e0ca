// The K-shift of other devices' cells by the CPU: where a device can't rotate K of a type, or where repeated roundings need noise.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cache/kv_cache.h"
#include "graph/rotate.h"
#include "graph/update_graph.h"

namespace kvg {

class host_shift {
public:
    // there: as on the device of the cells. Built and allocated, for as many rows at a time as bounded scratch takes. error(KVG_DEVICE)
    host_shift(update_runner & runner, const kv_cache & cache, const rotation & there, bool noisy);
    // Fetches the rows of a part that wait, rotates them and puts them back. error(KVG_DEVICE), some of them being rotated
    void run(const kv_part & part);

private:
    void rotate_piece(const waiting_rows & piece, ggml_tensor * k);

    update_runner & runner_;
    const kv_cache & cache_;
    std::unique_ptr<hadamard> mixed_;
    update_graph graph_;
    ggml_tensor * rows_;
    row_inputs inputs_;
};

} // namespace kvg
