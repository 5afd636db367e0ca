#include "cache/shift_plan.h"

#include <map>

namespace kvg {

std::vector<shift_lot> plan_shift(const cells & cells, uint32_t align, size_t max_spans) {
    std::map<uint8_t, shift_lot> lots;
    size_t n_spans = 0;
    for (uint32_t i = 0; i < cells.n_kv();) {
        const uint32_t begin = i++;
        if (cells.shift(begin) == 0) {
            continue;
        }
        const uint8_t turns = cells.turns(begin);
        while (i < cells.n_kv() && cells.shift(i) != 0 && cells.turns(i) == turns) {
            ++i;
        }
        shift_lot & lot = lots.try_emplace(turns, shift_lot{turns, {}, {}}).first->second;
        uint32_t aligned = (begin + align - 1) / align * align;
        if (aligned < i && n_spans < max_spans) {
            lot.spans.push_back({aligned, i - aligned});
            ++n_spans;
        } else {
            aligned = i;
        }
        for (uint32_t row = begin; row < aligned; ++row) {
            lot.rows.push_back(row);
        }
    }
    std::vector<shift_lot> out;
    for (auto & [turns, lot] : lots) {
        out.push_back(std::move(lot));
    }
    return out;
}

} // namespace kvg
