#include "cache/defrag_plan.h"

namespace kvg {

std::vector<cell_run> plan_fill(const cells & cells) {
    std::vector<cell_run> runs;
    uint32_t src = cells.n_used();
    for (uint32_t dst = 0; dst < cells.n_used(); ++dst) {
        if (!cells.is_empty(dst)) {
            continue;
        }
        // as many holes below n_used as used cells beyond it: src stays inside
        while (cells.is_empty(src)) {
            ++src;
        }
        if (!runs.empty() && runs.back().src + runs.back().n == src && runs.back().dst + runs.back().n == dst) {
            ++runs.back().n;
        } else {
            runs.push_back({src, dst, 1});
        }
        ++src;
    }
    return runs;
}

} // namespace kvg
