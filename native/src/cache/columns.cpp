#include "cache/columns.h"

#include <algorithm>
#include <cstring>

namespace kvg {

namespace {

constexpr size_t BLOCK = 32; // cells at a time: their packed rows stay in the cache while every channel is visited

// Calls visit(offset of an element in the matrix, offset of it in the packed rows), the matrix read along its rows.
template <class F> void each_element(const columns & m, const std::vector<uint32_t> & cells, F visit) {
    for (size_t first = 0; first < cells.size(); first += BLOCK) {
        const size_t last = std::min(first + BLOCK, cells.size());
        for (size_t row = 0; row < m.n_rows; ++row) {
            for (size_t i = first; i < last; ++i) {
                visit(row * m.n_columns + cells[i], i * m.n_rows + row);
            }
        }
    }
}

template <class T> void read_as(const columns & m, const std::vector<uint32_t> & cells, uint8_t * out) {
    const T * from = reinterpret_cast<const T *>(m.data);
    each_element(m, cells, [&](size_t in, size_t packed) { memcpy(out + packed * sizeof(T), from + in, sizeof(T)); });
}

template <class T> void write_as(const columns & m, const std::vector<uint32_t> & cells, const uint8_t * in) {
    T * to = reinterpret_cast<T *>(m.data);
    each_element(m, cells, [&](size_t out, size_t packed) { memcpy(to + out, in + packed * sizeof(T), sizeof(T)); });
}

// memcpy of a known size is one instruction; runs of one cell are the usual ones among scattered cells
template <class T> void copy_run(uint8_t * to, const uint8_t * from, size_t n) {
    if (n == 1) {
        memcpy(to, from, sizeof(T));
    } else {
        memcpy(to, from, n * sizeof(T));
    }
}

template <class T> void move_row(uint8_t * row, const std::vector<cell_run> & runs, std::vector<uint8_t> & scratch) {
    uint8_t * packed = scratch.data();
    for (const cell_run & run : runs) {
        copy_run<T>(packed, row + run.src * sizeof(T), run.n);
        packed += run.n * sizeof(T);
    }
    packed = scratch.data();
    for (const cell_run & run : runs) {
        copy_run<T>(row + run.dst * sizeof(T), packed, run.n);
        packed += run.n * sizeof(T);
    }
}

} // namespace

void columns::read(const std::vector<uint32_t> & cells, uint8_t * out) const {
    element == 2 ? read_as<uint16_t>(*this, cells, out) : read_as<uint32_t>(*this, cells, out);
}

void columns::write(const std::vector<uint32_t> & cells, const uint8_t * in) {
    element == 2 ? write_as<uint16_t>(*this, cells, in) : write_as<uint32_t>(*this, cells, in);
}

void columns::zero(size_t n) {
    for (size_t row = 0; row < n_rows; ++row) {
        memset(data + row * row_bytes(), 0, n * element);
    }
}

void columns::move(const std::vector<cell_run> & runs, size_t ith, size_t nth) {
    size_t n_cells = 0;
    for (const cell_run & run : runs) {
        n_cells += run.n;
    }
    std::vector<uint8_t> scratch(n_cells * element);
    for (size_t row = n_rows * ith / nth; row < n_rows * (ith + 1) / nth; ++row) {
        uint8_t * begin = data + row * row_bytes();
        element == 2 ? move_row<uint16_t>(begin, runs, scratch) : move_row<uint32_t>(begin, runs, scratch);
    }
}

} // namespace kvg
