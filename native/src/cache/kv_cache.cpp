#include "cache/kv_cache.h"

#include <algorithm>
#include <cstring>

#include "device.h"
#include "error.h"
#include "parallel.h"

namespace kvg {

static constexpr uint64_t MAX_ZEROS = 4ull << 20;   // bytes written at a time
static constexpr size_t MIN_SHARED_COPY = 1u << 20; // bytes from which starting threads pays

// Rows for n_cells, padded. Refuses a cache that the device or the host can't hold: a kernel that overcommits would kill the
// process later, when the memory is touched.
static uint32_t checked_rows(ggml_backend_dev_t device, const hparams & h, uint32_t n_cells, uint32_t n_seq_max,
                             ggml_type type_k, ggml_type type_v) {
    const uint32_t n_rows = (n_cells + MAX_SPAN_ALIGN - 1) / MAX_SPAN_ALIGN * MAX_SPAN_ALIGN;
    const uint64_t row_bytes = ggml_row_size(type_k, h.n_embd_kv()) + ggml_row_size(type_v, h.n_embd_kv());
    uint64_t tensors = 0;
    if (__builtin_mul_overflow(row_bytes * h.n_layer, n_rows, &tensors)) {
        tensors = UINT64_MAX / 2;
    }
    const uint64_t bookkeeping = uint64_t{n_cells} * (2 * sizeof(int32_t) + 1 + (n_seq_max + 63) / 64 * sizeof(uint64_t));
    const auto require = [&](ggml_backend_dev_t where, uint64_t bytes) {
        const memory there = device_memory(where);
        if (there.total > 0 && bytes > there.free) {
            fail(KVG_DEVICE,
                 "a cache of %u cells needs %s on %s and %s are free; use a smaller n_ctx or type_k/type_v=\"q8_0\"", n_cells,
                 format_bytes(bytes).c_str(), ggml_backend_dev_name(where), format_bytes(there.free).c_str());
        }
    };
    require(device, tensors);
    require(cpu_device(), bookkeeping + (is_cpu(device) ? tensors : 0));
    return n_rows;
}

kv_cache::kv_cache(ggml_backend_dev_t device, const hparams & h, uint32_t n_cells, uint32_t n_seq_max, ggml_type type_k,
                   ggml_type type_v, const hadamard_sizes & rotated)
    : n_rows_(checked_rows(device, h, n_cells, n_seq_max, type_k, type_v)), cells_(n_cells, n_seq_max), n_head_kv_(h.n_head_kv),
      head_dim_(h.head_dim), hadamard_k_(rotated.k ? std::make_unique<hadamard>(device, rotated.k) : nullptr),
      hadamard_v_(rotated.v ? std::make_unique<hadamard>(device, rotated.v) : nullptr) {
    ggml_context_ptr ctx(ggml_init({2 * h.n_layer * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true}));
    for (uint32_t il = 0; ctx && il < h.n_layer; ++il) {
        k_.push_back(ggml_new_tensor_2d(ctx.get(), type_k, h.n_embd_kv(), n_rows_));
        v_.push_back(ggml_new_tensor_2d(ctx.get(), type_v, h.n_embd_kv(), n_rows_));
        ggml_format_name(k_.back(), "cache_k_%u", il);
        ggml_format_name(v_.back(), "cache_v_%u", il);
    }
    buffer_.reset(ctx ? ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(device)) : nullptr);
    if (!buffer_) {
        fail(KVG_DEVICE, "%s refused the memory for a cache of %u cells, with %s free; use a smaller n_ctx",
             ggml_backend_dev_name(device), n_cells, format_bytes(device_memory(device).free).c_str());
    }
    ctx_ = std::move(ctx);
    tensors_ = k_;
    tensors_.insert(tensors_.end(), v_.begin(), v_.end());
    // attention multiplies masked rows by 0, and 0 times garbage can be NaN
    ggml_backend_buffer_clear(buffer_.get(), 0);
}

uint64_t kv_cache::bytes() const { return cell_bytes() * n_rows_; }

uint64_t kv_cache::cell_bytes() const {
    const int64_t n = int64_t{n_head_kv_} * head_dim_;
    return n_layer() * uint64_t{ggml_row_size(type_k(), n) + ggml_row_size(type_v(), n)};
}

ggml_tensor * kv_cache::heads(ggml_context * ctx, ggml_tensor * rows, uint32_t begin, uint32_t n) const {
    return ggml_view_3d(ctx, rows, head_dim_, n_head_kv_, n, ggml_row_size(rows->type, head_dim_), rows->nb[1],
                        rows->nb[1] * begin);
}

void kv_cache::read(uint32_t layer, bool v, float * out) const {
    const ggml_type type = v ? type_v() : type_k();
    const int64_t width = int64_t{n_head_kv_} * head_dim_;
    std::vector<uint8_t> raw(cells_.size() * ggml_row_size(type, width));
    ggml_backend_tensor_get(v ? v_[layer] : k_[layer], raw.data(), 0, raw.size());
    if (type == GGML_TYPE_F32) {
        memcpy(out, raw.data(), raw.size());
    } else {
        ggml_get_type_traits(type)->to_float(raw.data(), out, int64_t{cells_.size()} * width);
    }
    if (const hadamard * rotated = v ? hadamard_v() : hadamard_k()) {
        rotated->apply(out, cells_.size() * static_cast<size_t>(width));
    }
}

// Calls visit(tensor, offset in it, bytes, offset in the packed rows) for each run of neighbouring cells, tensor by tensor; in host
// memory on several threads when there is much to copy.
template <class F> void kv_cache::each_run(const std::vector<uint32_t> & cells, int n_threads, F visit) const {
    std::vector<std::pair<size_t, size_t>> runs; // first of `cells`, how many
    for (size_t i = 0; i < cells.size(); ++i) {
        if (i > 0 && cells[i] == cells[i - 1] + 1) {
            ++runs.back().second;
        } else {
            runs.emplace_back(i, 1);
        }
    }
    const auto tensor = [&](size_t i) { return i % 2 ? v_[i / 2] : k_[i / 2]; };
    std::vector<size_t> packed(2 * n_layer() + 1);
    for (size_t i = 0; i + 1 < packed.size(); ++i) {
        packed[i + 1] = packed[i] + cells.size() * tensor(i)->nb[1];
    }
    const bool shared = ggml_backend_buffer_is_host(buffer_.get()) && packed.back() >= MIN_SHARED_COPY;
    parallel_for(packed.size() - 1, shared ? static_cast<size_t>(n_threads) : 1, [&](size_t i) {
        const size_t row = tensor(i)->nb[1];
        for (const auto & [first, n] : runs) {
            visit(tensor(i), cells[first] * row, n * row, packed[i] + first * row);
        }
    });
}

void kv_cache::read_rows(const std::vector<uint32_t> & cells, uint8_t * out, int n_threads) const {
    each_run(cells, n_threads, [out](const ggml_tensor * t, size_t offset, size_t bytes, size_t packed) {
        ggml_backend_tensor_get(t, out + packed, offset, bytes);
    });
}

void kv_cache::write_rows(const std::vector<uint32_t> & cells, const uint8_t * data, int n_threads) {
    each_run(cells, n_threads, [data](ggml_tensor * t, size_t offset, size_t bytes, size_t packed) {
        ggml_backend_tensor_set(t, data + packed, offset, bytes);
    });
}

void kv_cache::zero_rows(uint32_t n) {
    for (ggml_tensor * rows : tensors_) {
        const std::vector<uint8_t> zeros(std::min<size_t>(MAX_ZEROS, n * rows->nb[1]));
        for (size_t done = 0; done < n * rows->nb[1]; done += zeros.size()) {
            ggml_backend_tensor_set(rows, zeros.data(), done, std::min(zeros.size(), n * rows->nb[1] - done));
        }
    }
}

// What is left in empty cells is multiplied by 0 whenever a span goes over them, and 0 times infinity is NaN: one overflow would
// outlive clear(). Only rows that were written since the last one are zeroed, which costs less than writing them did.
void kv_cache::clear(bool data) {
    const uint32_t n_touched = cells_.n_touched();
    const bool all = data || broken_;
    cells_.clear();
    broken_ = true; // until the rows are zero
    if (all) {
        ggml_backend_buffer_clear(buffer_.get(), 0);
    } else {
        zero_rows(n_touched);
    }
    broken_ = false;
}

} // namespace kvg
