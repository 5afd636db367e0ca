#include "memory/packed_rows.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "error.h"
#include "host_memory.h"
#include "memory/row_io.h"
#include "memory/update_graph.h"
#include "memory/words.h"

namespace kvg {

namespace {

std::vector<ggml_tensor *> tensors_of(const kv_group & group, size_t place) {
    const uint32_t layer = group.layers()[place];
    return group.v(layer) ? std::vector<ggml_tensor *>{group.k(layer), group.v(layer)}
                          : std::vector<ggml_tensor *>{group.k(layer)};
}

// Runs what build(graph, begin, n) adds to a graph, where the layer is, for n_rows rows: a part of them in each graph.
template <class F> void run_where(kv_group & group, size_t place, size_t n_rows, F build) {
    const kv_part & own = group.part_of(group.layers()[place]);
    const size_t most = max_gathered(group);
    for (size_t begin = 0; begin < n_rows; begin += most) {
        std::vector<update_graph> graphs;
        for (const kv_part & part : group.parts()) {
            update_graph & graph = graphs.emplace_back("pack", 16);
            if (&part == &own) {
                build(graph, begin, std::min(most, n_rows - begin));
            }
        }
        if (ggml_backend_t failed = run_graphs(group, graphs)) {
            fail(KVG_DEVICE, "%s failed while copying rows", ggml_backend_name(failed));
        }
    }
}

// The part of a list that a graph is for.
template <class T> std::vector<T> part_of(const std::vector<uint32_t> & list, size_t begin, size_t n) {
    const auto from = list.begin() + static_cast<std::ptrdiff_t>(begin);
    return {from, from + static_cast<std::ptrdiff_t>(n)};
}

bool is_in_order(const std::vector<uint32_t> & from) {
    for (size_t i = 0; i < from.size(); ++i) {
        if (from[i] != i) {
            return false;
        }
    }
    return true;
}

} // namespace

packed_rows::packed_rows(const kv_group & group, size_t place, uint32_t n_cells, bool on_device)
    : place_(place), n_cells_(n_cells), types_(group.types()), k_row_bytes_(group.k_row_bytes()),
      v_row_bytes_(group.v_row_bytes()) {
    if (!on_device || n_cells == 0) {
        bytes_.reset(new uint8_t[n_bytes()]); // not written twice
        return;
    }
    const kv_part & part = group.part_of(group.layers()[place]);
    device_ = part.device;
    ctx_ = new_ggml_context(2 * ggml_tensor_overhead());
    for (const ggml_tensor * rows : tensors_of(group, place)) {
        words_.push_back(
            ggml_new_tensor_2d(ctx_.get(), GGML_TYPE_F32, static_cast<int64_t>(rows->nb[1] / sizeof(float)), n_cells));
    }
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx_.get(), part.type));
    if (!buffer_) {
        fail(KVG_DEVICE, "%s has no memory for rows on their way", ggml_backend_dev_name(device_));
    }
}

bool packed_rows::is_on_device(const kv_group & group, size_t place) {
    return !ggml_backend_buffer_is_host(group.k(group.layers()[place])->buffer);
}

void packed_rows::gather(kv_group & group, const std::vector<uint32_t> & cells) {
    run_where(group, place_, cells.size(), [&](update_graph & graph, size_t begin, size_t n) {
        ggml_tensor * from = graph.input(part_of<int32_t>(cells, begin, n));
        const std::vector<ggml_tensor *> tensors = tensors_of(group, place_);
        for (size_t i = 0; i < tensors.size(); ++i) {
            ggml_tensor * rows = ggml_get_rows(graph.ctx(), as_words(graph.ctx(), tensors[i]), from);
            ggml_tensor * to = words_[i];
            graph.add(
                ggml_cpy(graph.ctx(), rows,
                         ggml_view_2d(graph.ctx(), to, to->ne[0], static_cast<int64_t>(n), to->nb[1], begin * to->nb[1])));
        }
    });
}

bool packed_rows::fits(const kv_group & group) const {
    const cache_types & types = group.types();
    return types.k == types_.k && types.v == types_.v && types.hadamard == types_.hadamard &&
           group.k_row_bytes() == k_row_bytes_ && group.v_row_bytes() == v_row_bytes_;
}

void packed_rows::scatter(kv_group & group, size_t place, const std::vector<uint32_t> & from,
                          const std::vector<uint32_t> & cells) const {
    run_where(group, place, cells.size(), [&](update_graph & graph, size_t begin, size_t n) {
        ggml_tensor * source = graph.input(part_of<int32_t>(from, begin, n));
        ggml_tensor * to = graph.input(part_of<int64_t>(cells, begin, n));
        const std::vector<ggml_tensor *> tensors = tensors_of(group, place);
        for (size_t i = 0; i < tensors.size(); ++i) {
            ggml_tensor * rows = ggml_get_rows(graph.ctx(), words_[i], source);
            graph.add(ggml_set_rows(graph.ctx(), as_words(graph.ctx(), tensors[i]), rows, to));
        }
    });
}

void packed_rows::write(kv_group & group, size_t place, const std::vector<uint32_t> & from,
                        const std::vector<uint32_t> & cells) const {
    if (cells.empty()) {
        return;
    }
    if (buffer_ && is_on_device(group, place) && group.part_of(group.layers()[place]).device == device_) {
        scatter(group, place, from, cells);
        return;
    }
    const std::vector<ggml_tensor *> tensors = tensors_of(group, place);
    const bool in_order = is_in_order(from);
    std::vector<uint8_t> fetched, chosen;
    const uint8_t * rows = bytes_.get();
    for (size_t i = 0; i < tensors.size(); ++i) {
        const size_t size = tensors[i]->nb[1];
        if (buffer_) {
            fetched.resize(n_cells_ * size);
            ggml_backend_tensor_get(words_[i], fetched.data(), 0, fetched.size());
            rows = fetched.data();
        }
        if (!in_order) {
            chosen.resize(from.size() * size);
            for (size_t row = 0; row < from.size(); ++row) {
                memcpy(chosen.data() + row * size, rows + from[row] * size, size);
            }
        }
        write_rows_of(tensors[i], cells, in_order ? rows : chosen.data());
        rows += n_cells_ * size;
    }
}

} // namespace kvg
