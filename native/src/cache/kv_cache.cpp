#include "cache/kv_cache.h"

#include <cstring>

#include "device.h"
#include "error.h"

namespace kvg {

static constexpr uint32_t ROW_PAD = 256;

kv_cache::kv_cache(ggml_backend_dev_t device, const hparams & h, uint32_t n_cells, uint32_t n_seq_max, ggml_type type_k,
                   ggml_type type_v)
    : cells_(n_cells, n_seq_max), n_rows_((n_cells + ROW_PAD - 1) / ROW_PAD * ROW_PAD), n_head_kv_(h.n_head_kv),
      head_dim_(h.head_dim) {
    const uint64_t row_bytes = ggml_row_size(type_k, h.n_embd_kv()) + ggml_row_size(type_v, h.n_embd_kv());
    const uint64_t wanted = row_bytes * h.n_layer * n_rows_; // below 2^24 * 2^9 * 2^31: no overflow
    size_t free = 0;
    size_t total = 0;
    ggml_backend_dev_memory(device, &free, &total);
    ggml_context_ptr ctx(ggml_init({2 * h.n_layer * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true}));
    const bool hopeless = !ctx || (total > 0 && wanted > total);
    if (!hopeless) {
        for (uint32_t il = 0; il < h.n_layer; ++il) {
            k_.push_back(ggml_new_tensor_2d(ctx.get(), type_k, h.n_embd_kv(), n_rows_));
            v_.push_back(ggml_new_tensor_2d(ctx.get(), type_v, h.n_embd_kv(), n_rows_));
            ggml_format_name(k_.back(), "cache_k_%u", il);
            ggml_format_name(v_.back(), "cache_v_%u", il);
        }
        buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(device)));
    }
    if (!buffer_) {
        fail(KVG_DEVICE, "%s: a cache of %u cells needs %s and %s of %s are free; use a smaller n_ctx or type_k/type_v=\"f16\"",
             ggml_backend_dev_name(device), n_cells, format_bytes(wanted).c_str(), format_bytes(free).c_str(),
             format_bytes(total).c_str());
    }
    ctx_ = std::move(ctx);
    tensors_ = k_;
    tensors_.insert(tensors_.end(), v_.begin(), v_.end());
    // attention multiplies masked rows by 0, and 0 times garbage can be NaN
    ggml_backend_buffer_clear(buffer_.get(), 0);
}

uint64_t kv_cache::bytes() const { return cell_bytes() * n_rows_; }

uint64_t kv_cache::cell_bytes() const {
    uint64_t bytes = 0;
    for (const ggml_tensor * t : tensors_) {
        bytes += t->nb[1];
    }
    return bytes;
}

ggml_tensor * kv_cache::heads(ggml_context * ctx, ggml_tensor * rows, uint32_t begin, uint32_t n) const {
    return ggml_view_3d(ctx, rows, head_dim_, n_head_kv_, n, ggml_row_size(rows->type, head_dim_), rows->nb[1],
                        rows->nb[1] * begin);
}

void kv_cache::read(const ggml_tensor * rows, float * out) const {
    const size_t n_floats = static_cast<size_t>(cells_.size()) * static_cast<size_t>(rows->ne[0]);
    const size_t n_bytes = static_cast<size_t>(cells_.size()) * rows->nb[1];
    if (rows->type == GGML_TYPE_F32) {
        ggml_backend_tensor_get(rows, out, 0, n_bytes);
        return;
    }
    std::vector<uint8_t> raw(n_bytes);
    ggml_backend_tensor_get(rows, raw.data(), 0, n_bytes);
    ggml_get_type_traits(rows->type)->to_float(raw.data(), out, static_cast<int64_t>(n_floats));
}

void kv_cache::clear(bool data) {
    cells_.clear();
    if (data || broken_) {
        ggml_backend_buffer_clear(buffer_.get(), 0);
    }
    broken_ = false;
}

} // namespace kvg
