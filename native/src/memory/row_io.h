// Copies raw rows of cells between host memory and a group's tensors, on any device.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/kv_group.h"

namespace kvg {

// Neighbouring cells, in this order.
std::vector<cell_span> runs_of(const std::vector<uint32_t> & cells);

// Copies the rows of these cells from one tensor. In host memory the rows lie one after the other, in the order of `cells`.
void read_rows_of(const ggml_tensor * rows, const std::vector<uint32_t> & cells, uint8_t * out);
// The reverse. It may also rewrite rows that lie between these cells, with their own bytes. precondition: no other thread uses the tensor
void write_rows_of(ggml_tensor * rows, const std::vector<uint32_t> & cells, const uint8_t * data);
// The same, but writes these rows only: other threads may use the other rows at the same time.
void write_only_rows_of(ggml_tensor * rows, const std::vector<uint32_t> & cells, const uint8_t * data);

// Layers [begin, end) of a group; the numbers are indices into kv_group::layers().
struct layer_range {
    size_t begin;
    size_t end;

    size_t size() const { return end - begin; }
};

// Bytes of n cells in these layers.
uint64_t rows_bytes(const kv_group & group, const layer_range & range, uint64_t n_cells);

// `out` gets K and then V of each of these layers, a row per cell in the order of `cells`; rows_bytes() in total. Uses several threads
// only when there is much to copy.
void read_rows(const kv_group & group, const layer_range & range, const std::vector<uint32_t> & cells, uint8_t * out,
               int n_threads);
void write_rows(kv_group & group, const layer_range & range, const std::vector<uint32_t> & cells, const uint8_t * data,
                int n_threads);

} // namespace kvg
