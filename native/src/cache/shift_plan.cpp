#include "cache/shift_plan.h"

namespace kvg {

std::vector<cell_span> plan_shift(const cells & cells, uint32_t align, size_t max_spans) {
    std::vector<cell_span> spans;
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        if (cells.shift(i) == 0) {
            continue;
        }
        const uint32_t begin = i / align * align;
        if (!spans.empty() && begin <= spans.back().begin + spans.back().n) {
            spans.back().n = i + 1 - spans.back().begin;
        } else {
            spans.push_back({begin, i + 1 - begin});
        }
    }
    if (spans.size() > max_spans) {
        const uint32_t begin = spans.front().begin;
        return {{begin, spans.back().begin + spans.back().n - begin}};
    }
    return spans;
}

} // namespace kvg
