#include "shift/on_cpu.h"

#include <algorithm>

#include "fault.h"
#include "memory/row_io.h"
#include "parallel.h"

namespace kvg {

row_rotator::row_rotator(const kv_group & group, const std::vector<layer_rotation> & layers, const rotation_list & list,
                         ggml_type type, int n_threads, bool are_mixed)
    : group_(group), layers_(layers), list_(list), kernel_(kernels_here()[0]->rows), type_(type), are_mixed_(are_mixed),
      width_(group.spec().n_head_kv * group.spec().head_dim_k), n_threads_(static_cast<size_t>(n_threads)),
      tables_(list.rotations, type), scratch_(n_threads_ * attend_padded(width_)) {}

void row_rotator::rotate_share(const job & job, size_t thread, size_t n_threads) {
    const head_rotation heads = job.how->heads_of(group_.spec().head_dim_k);
    const hadamard * mixed = are_mixed_ ? job.how->mixed : nullptr;
    float * x = scratch_.data() + thread * attend_padded(width_);
    for (size_t i = thread; i < job.rows->size(); i += n_threads) {
        const auto [number, index] = (*job.rows)[i];
        uint8_t * row = job.data + number * job.stride;
        kernel_.to_floats(type_, row, x, width_);
        if (mixed) { // a second time, which undoes it: rope rotates pairs of the unmixed dimensions
            mixed->apply(x, width_);
        }
        kernel_.rotate(x, group_.spec().n_head_kv, heads, job.table + size_t{index} * 2 * heads.n_pairs);
        if (mixed) {
            mixed->apply(x, width_);
        }
        kernel_.from_floats(type_, x, row, width_);
    }
}

void row_rotator::rotate(uint32_t layer, const std::vector<rotated_row> & rows, uint8_t * data, size_t stride) {
    const job job = {this, &layers_[layer], tables_.of(layers_[layer]), &rows, data, stride};
    if (job.table) {
        parallel_for(n_threads_, n_threads_, [&](size_t thread) { rotate_share(job, thread, n_threads_); });
    }
}

void row_rotator::compute(ggml_tensor *, const ggml_tensor *, int ith, int nth, void * userdata) {
    const auto & job = *static_cast<const row_rotator::job *>(userdata);
    job.self->rotate_share(job, static_cast<size_t>(ith), static_cast<size_t>(nth));
}

ggml_tensor * row_rotator::node(ggml_context * ctx, uint32_t layer) {
    const layer_rotation & how = layers_[layer];
    ggml_tensor * k = group_.k(layer);
    jobs_.push_back({this, &how, tables_.of(how), &list_.rows, static_cast<uint8_t *>(k->data), k->nb[1]});
    return ggml_map_custom1_inplace(ctx, k, compute, static_cast<int>(n_threads_), &jobs_.back());
}

ggml_status row_rotator::rotate_fetched(uint32_t layer) {
    ggml_tensor * k = group_.k(layer);
    const size_t max_rows = std::max<size_t>(1, MAX_SHIFT_SCRATCH / k->nb[1]);
    std::vector<uint8_t> raw(std::min(max_rows, list_.rows.size()) * k->nb[1]);
    for (size_t first = 0; first < list_.rows.size(); first += max_rows) {
        std::vector<uint32_t> cells;
        std::vector<rotated_row> fetched;
        for (size_t i = first; i < std::min(first + max_rows, list_.rows.size()); ++i) {
            fetched.push_back({static_cast<uint32_t>(cells.size()), list_.rows[i].index});
            cells.push_back(list_.rows[i].row);
        }
        read_rows_of(k, cells, raw.data());
        rotate(layer, fetched, raw.data(), k->nb[1]);
        write_rows_of(k, cells, raw.data());
        if (fault_hit("shift-compute")) {
            return GGML_STATUS_FAILED;
        }
    }
    return GGML_STATUS_SUCCESS;
}

} // namespace kvg
