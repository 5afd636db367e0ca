#include "shift/host_shift.h"

#include <algorithm>

#include "fault.h"
#include "memory/row_io.h"

namespace kvg {

ggml_status shift_on_host(const kv_group & group, const kv_part & part, cpu_rotation & rotation) {
    const size_t row = group.k_row_bytes();
    const std::vector<uint32_t> & cells = rotation.cells();
    const size_t max_rows = std::max<size_t>(1, MAX_SHIFT_SCRATCH / row);
    std::vector<uint8_t> raw(std::min(max_rows, cells.size()) * row);
    for (size_t first = 0; first < cells.size(); first += max_rows) {
        const std::vector<uint32_t> piece(cells.begin() + static_cast<ptrdiff_t>(first),
                                          cells.begin() + static_cast<ptrdiff_t>(std::min(first + max_rows, cells.size())));
        for (uint32_t il : part.layers) {
            read_rows_of(group.k(il), piece, raw.data());
            rotation.rotate_all(first, piece.size(), [&](size_t i) { return raw.data() + i * row; });
            write_rows_of(group.k(il), piece, raw.data());
            if (fault_hit("shift-compute")) {
                return GGML_STATUS_FAILED;
            }
        }
    }
    return GGML_STATUS_SUCCESS;
}

} // namespace kvg
