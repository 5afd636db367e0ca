#include "graph/host_shift.h"

#include <algorithm>

#include "fault.h"
#include "parallel.h"

namespace kvg {

static void rotate_all(std::vector<uint8_t> & raw, size_t row, size_t first, size_t n, cpu_rotation & rotation) {
    const auto n_threads = static_cast<size_t>(rotation.n_threads());
    parallel_for(n_threads, n_threads, [&](size_t thread) {
        for (size_t i = thread; i < n; i += n_threads) {
            rotation.rotate(first + i, raw.data() + i * row, static_cast<int>(thread));
        }
    });
}

ggml_status shift_on_host(const kv_cache & cache, const kv_part & part, cpu_rotation & rotation) {
    const size_t row = cache.k(0)->nb[1]; // layers are alike
    const std::vector<uint32_t> & cells = rotation.cells();
    const size_t max_rows = std::max<size_t>(1, MAX_SHIFT_SCRATCH / row);
    std::vector<uint8_t> raw(std::min(max_rows, cells.size()) * row);
    for (size_t first = 0; first < cells.size(); first += max_rows) {
        const std::vector<uint32_t> piece(cells.begin() + static_cast<ptrdiff_t>(first),
                                          cells.begin() + static_cast<ptrdiff_t>(std::min(first + max_rows, cells.size())));
        for (uint32_t il : part.layers) {
            read_rows_of(cache.k(il), piece, raw.data());
            rotate_all(raw, row, first, piece.size(), rotation);
            write_rows_of(cache.k(il), piece, raw.data());
            if (fault_hit("shift-compute")) {
                return GGML_STATUS_FAILED;
            }
        }
    }
    return GGML_STATUS_SUCCESS;
}

} // namespace kvg
