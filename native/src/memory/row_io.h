// Raw rows of cells between a group's tensors, wherever they are, and host memory.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/kv_group.h"

namespace kvg {

// Rows of these cells of one tensor; in host memory they lie one after the other.
void read_rows_of(const ggml_tensor * rows, const std::vector<uint32_t> & cells, uint8_t * out);
// precondition: nobody else uses the tensor, as rows between these may be written again
void write_rows_of(ggml_tensor * rows, const std::vector<uint32_t> & cells, const uint8_t * data);
// The same without touching any other row, for when others use those.
void write_only_rows_of(ggml_tensor * rows, const std::vector<uint32_t> & cells, const uint8_t * data);

// Some of a group's layers, by their places in it.
struct layer_range {
    size_t begin;
    size_t end;

    size_t size() const { return end - begin; }
};

// Bytes of n cells in these layers.
uint64_t rows_bytes(const kv_group & group, const layer_range & range, uint64_t n_cells);

// For each of these layers K then V, a row per cell, in the order of `cells`: rows_bytes() in all. Several threads when there is much
// to copy.
void read_rows(const kv_group & group, const layer_range & range, const std::vector<uint32_t> & cells, uint8_t * out,
               int n_threads);
void write_rows(kv_group & group, const layer_range & range, const std::vector<uint32_t> & cells, const uint8_t * data,
                int n_threads);

} // namespace kvg
