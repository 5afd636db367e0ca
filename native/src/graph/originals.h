// K of a few cells as it was before a change of the frame made it turn: most cells move, these don't, and are rotated all the same, as
// often as the others move. Each time it is from the original, so that they are rounded once more and not as often.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/kv_cache.h"

namespace kvg {

class originals {
public:
    // For one cell of eight: K is half of the cache, so this is a sixteenth of it at most, in host memory, and none before it is needed.
    explicit originals(const kv_cache & cache);

    // For how many more there is room, beside those that cells refer to.
    uint32_t room(const cells & cells) const;
    // Fetches K of these cells, which refer to it from then on. Those beyond the room have none. std::bad_alloc: nothing changed
    void keep(kv_cache & cache, const std::vector<uint32_t> & which);

    // The position that K of an original is rotated for, and its dither.
    int32_t place(uint32_t original) const { return kept_[original].place; }
    uint8_t dither(uint32_t original) const { return kept_[original].dither; }
    // The row of a layer's K.
    void read_row(uint32_t original, uint32_t layer, uint8_t * out) const noexcept;

private:
    struct kept_cell {
        int32_t place;
        uint8_t dither;
        std::vector<uint8_t> rows; // one of each layer
    };
    std::vector<uint32_t> free_slots(const cells & cells) const;

    uint32_t max_;
    uint32_t n_layer_;
    size_t row_; // bytes; layers are alike
    std::vector<kept_cell> kept_;
};

} // namespace kvg
