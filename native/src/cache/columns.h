// V transposed: a column per cell, in host memory. Attention then reads V as it lies; whatever goes by cells pays for it here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/cells.h"

namespace kvg {

// A matrix of n_rows channels over n_columns cells, elements of 2 or 4 bytes.
struct columns {
    uint8_t * data;
    size_t element;
    size_t n_columns;
    size_t n_rows;

    size_t row_bytes() const { return n_columns * element; }
    // Packed rows, one per cell: n_cells * n_rows elements.
    void read(const std::vector<uint32_t> & cells, uint8_t * out) const;
    void write(const std::vector<uint32_t> & cells, const uint8_t * in);
    // The first n cells.
    void zero(size_t n);
    // The share of thread `ith` of `nth`: all columns of a row are gathered before any is written, so moves may form cycles.
    void move(const std::vector<cell_run> & runs, size_t ith, size_t nth);
};

} // namespace kvg
