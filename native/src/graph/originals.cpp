#include "graph/originals.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvg {

originals::originals(const kv_cache & cache)
    : max_(cache.cells().size() / 8), n_layer_(cache.n_layer()), row_(cache.k(0)->nb[1]) {}

std::vector<uint32_t> originals::free_slots(const cells & cells) const {
    std::vector<bool> taken(max_);
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        if (cells.original(i) != cells::NO_ORIGINAL) {
            taken[cells.original(i)] = true;
        }
    }
    std::vector<uint32_t> free;
    for (uint32_t slot = 0; slot < max_; ++slot) {
        if (!taken[slot]) {
            free.push_back(slot);
        }
    }
    return free;
}

uint32_t originals::room(const cells & cells) const { return static_cast<uint32_t>(free_slots(cells).size()); }

void originals::keep(kv_cache & cache, const std::vector<uint32_t> & which) {
    cells & cells = cache.cells();
    const std::vector<uint32_t> slots = free_slots(cells);
    const std::vector<uint32_t> fit(which.begin(),
                                    which.begin() + static_cast<ptrdiff_t>(std::min(which.size(), slots.size())));
    std::vector<kept_cell> fetched(fit.size());
    for (kept_cell & kept : fetched) {
        kept.rows.resize(row_ * n_layer_);
    }
    std::vector<uint8_t> raw(row_ * fit.size());
    for (uint32_t il = 0; il < n_layer_ && !fit.empty(); ++il) {
        read_rows_of(cache.k(il), fit, raw.data());
        for (size_t i = 0; i < fit.size(); ++i) {
            std::memcpy(fetched[i].rows.data() + il * row_, raw.data() + i * row_, row_);
        }
    }
    const uint32_t n_slots = fit.empty() ? 0 : slots[fit.size() - 1] + 1; // they rise
    kept_.resize(std::max<size_t>(kept_.size(), n_slots));
    for (size_t i = 0; i < fit.size(); ++i) {
        fetched[i].place = cells.pos(fit[i]) + cells.frame() - cells.shift(fit[i]);
        fetched[i].dither = cells.dither(fit[i]);
        kept_[slots[i]] = std::move(fetched[i]);
        cells.set_original(fit[i], slots[i]);
    }
}

void originals::read_row(uint32_t original, uint32_t layer, uint8_t * out) const noexcept {
    std::memcpy(out, kept_[original].rows.data() + layer * row_, row_);
}

} // namespace kvg
