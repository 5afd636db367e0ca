#include "runtime/reservation.h"

#include "memory/slots.h"

namespace kvg {

reservation::reservation(kv_cache & cache, const batch & batch) : cache_(cache), batch_(batch) {
    for (const kv_group & group : cache.groups()) {
        require_room(group.cells(), batch.n_tokens(), "the batch");
    }
    for (kv_group & group : cache.groups()) {
        slots_.push_back(find_slots(group.cells(), batch.n_tokens(), "the batch"));
    }
}

reservation::~reservation() {
    for (size_t g = 0; g < slots_.size(); ++g) {
        for (uint32_t i = 0; i < n_put_; ++i) {
            cache_.groups()[g].cells().drop(slots_[g][i]);
        }
    }
}

std::vector<std::vector<uint32_t>> reservation::slots_of(uint32_t begin, uint32_t n) const {
    std::vector<std::vector<uint32_t>> cells;
    for (const std::vector<uint32_t> & all : slots_) {
        cells.emplace_back(all.begin() + begin, all.begin() + begin + n);
    }
    return cells;
}

void reservation::put(uint32_t begin, uint32_t n) {
    for (uint32_t i = begin; i < begin + n; ++i) {
        for (size_t g = 0; g < slots_.size(); ++g) {
            cache_.groups()[g].cells().put(slots_[g][i], batch_.positions()[i], batch_.set(i));
        }
        ++n_put_;
    }
}

} // namespace kvg
