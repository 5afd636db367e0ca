#include "memory/compose.h"

#include <cstring>

#include "fault.h"
#include "memory/row_io.h"

namespace kvg {

void compose_rows(kv_group & group, const std::vector<uint32_t> & cells, const std::vector<uint32_t> & kept,
                  const int32_t * from) {
    const size_t n_heads = group.spec().n_head_kv;
    std::vector<uint8_t> before;
    std::vector<uint8_t> after;
    for (const uint32_t layer : group.layers()) {
        for (ggml_tensor * rows : {group.k(layer), group.v(layer)}) {
            if (rows == nullptr) { // V is a part of K
                continue;
            }
            // whole blocks of any type: require_blocks_fit()
            const size_t row_bytes = rows->nb[1];
            const size_t head_bytes = row_bytes / n_heads;
            before.resize(cells.size() * row_bytes);
            after.resize(kept.size() * row_bytes);
            read_rows_of(rows, cells, before.data());
            for (size_t h = 0; h < n_heads; ++h) {
                for (size_t i = 0; i < kept.size(); ++i) {
                    const auto source = static_cast<size_t>(from[h * kept.size() + i]);
                    memcpy(after.data() + i * row_bytes + h * head_bytes, before.data() + source * row_bytes + h * head_bytes,
                           head_bytes);
                }
            }
            write_only_rows_of(rows, kept, after.data());
            fault_point("compose-rows");
        }
        from += n_heads * kept.size();
    }
}

} // namespace kvg
