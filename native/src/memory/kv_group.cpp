#include "memory/kv_group.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "device.h"
#include "error.h"
#include "host_memory.h"

namespace kvg {

static constexpr uint64_t MAX_ZEROS = 4ull << 20; // bytes written at a time

// Rows in host memory that a device copies come from memory that it copies from faster, if it has such memory.
static ggml_backend_buffer_type_t buffer_type(const kv_part & part) {
    ggml_backend_buffer_type_t pinned = part.reader == part.device ? nullptr : ggml_backend_dev_host_buffer_type(part.reader);
    return pinned ? pinned : ggml_backend_dev_buffer_type(part.device);
}

kv_group::kv_group(const group_spec & spec, const kv_homes & homes, const backends & backends, uint32_t n_cells,
                   uint32_t n_rows, uint32_t n_seq_max, const cache_types & types, bool reuses)
    : spec_(spec), types_(types), n_rows_(n_rows),
      cells_(n_cells, n_seq_max, spec.window, reuses, spec.chunked, spec.both_ways), k_(spec.layers.size()),
      v_(spec.layers.size()), old_k_(spec.layers.size()), old_v_(spec.layers.size()) {
    cells_.set_n_fresh(types.n_fresh);
    for (const uint32_t il : spec.layers) {
        const auto same = [&](const kv_part & part) {
            return part.device == homes.cells[il] && part.reader == homes.readers[il];
        };
        auto part = std::find_if(parts_.begin(), parts_.end(), same);
        if (part == parts_.end()) {
            parts_.emplace_back();
            part = parts_.end() - 1;
            part->device = homes.cells[il];
            part->reader = homes.readers[il];
            part->backend = backends.of(part->device);
            part->type = buffer_type(*part);
        }
        part->layers.push_back(il);
    }
    for (kv_part & part : parts_) {
        create(part);
    }
}

// K and V of all of a part's layers.
void kv_group::create_rows(kv_part & part, bool old) {
    const int64_t n = old ? n_rows_ - types_.n_fresh : ages() ? types_.n_fresh : n_rows_;
    const char * prefix = old ? "old_cache" : "cache";
    std::vector<ggml_tensor *> & k = old ? old_k_ : k_;
    std::vector<ggml_tensor *> & v = old ? old_v_ : v_;
    for (const uint32_t il : part.layers) {
        ggml_tensor * rows = ggml_new_tensor_2d(part.ctx.get(), old ? types_.old_k : types_.k, spec_.k_width(), n);
        ggml_format_name(rows, "%s_k_%u", prefix, il);
        part.tensors.push_back(k[place_of(il)] = rows);
    }
    for (const uint32_t il : spec_.v_in_k > 0 ? std::vector<uint32_t>() : part.layers) {
        ggml_tensor * rows = ggml_new_tensor_2d(part.ctx.get(), old ? types_.old_v : types_.v, spec_.v_width(), n);
        ggml_format_name(rows, "%s_v_%u", prefix, il);
        part.tensors.push_back(v[place_of(il)] = rows);
    }
}

void kv_group::create(kv_part & part) {
    part.ctx = new_ggml_context(4 * part.layers.size() * ggml_tensor_overhead());
    part.buffer.reset(ggml_backend_buft_alloc_buffer(part.type, 0));
    if (!part.buffer) {
        fail(KVG_DEVICE, "out of host memory for the cache's tensors");
    }
    create_rows(part, false);
    if (ages()) {
        create_rows(part, true);
    }
    part.bytes = ggml_backend_alloc_ctx_tensors_from_buft_size(part.ctx.get(), part.type);
    for (ggml_tensor * t : part.tensors) {
        t->buffer = part.buffer.get(); // says where it will be, and has no address
    }
    part.hadamard_k = mixed().k > 0 ? std::make_unique<hadamard>(part.reader, mixed().k) : nullptr;
    part.hadamard_v = mixed().v > 0 ? std::make_unique<hadamard>(part.reader, mixed().v) : nullptr;
}

hadamard_sizes kv_group::mixed() const {
    return types_.hadamard ? choose_hadamard(spec_, types_.last_k(), types_.last_v()) : hadamard_sizes{0, 0};
}

void kv_group::allocate() {
    for (kv_part & part : parts_) {
        for (ggml_tensor * t : part.tensors) {
            t->buffer = nullptr;
        }
        part.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(part.ctx.get(), part.type));
        if (!part.buffer) {
            fail(KVG_DEVICE, "%s refused %s for a cache of %u cells, with %s free; use a smaller n_ctx",
                 ggml_backend_dev_name(part.device), format_bytes(part.bytes).c_str(), cells_.size(),
                 format_bytes(device_memory(part.device).free).c_str());
        }
        part.bytes = ggml_backend_buffer_get_size(part.buffer.get());
        ggml_backend_buffer_t last = nullptr; // pinned memory may come in several
        for (const ggml_tensor * rows : part.tensors) {
            if (rows->buffer != last && ggml_backend_buffer_is_host(rows->buffer)) {
                last = rows->buffer;
                advise_huge_pages(ggml_backend_buffer_get_base(last), ggml_backend_buffer_get_size(last));
            }
        }
        for (hadamard * matrix : {part.hadamard_k.get(), part.hadamard_v.get()}) {
            if (matrix) {
                matrix->allocate();
            }
        }
    }
}

uint64_t layer_bytes(const group_spec & spec, const cache_types & types, uint64_t n_rows) {
    const auto row_bytes = [&](ggml_type k, ggml_type v) {
        return ggml_row_size(k, spec.k_width()) + ggml_row_size(v, spec.v_width());
    };
    const uint64_t n_old = types.n_fresh > 0 ? n_rows - types.n_fresh : 0;
    uint64_t bytes = 0;
    uint64_t old_bytes = 0;
    const bool is_too_much = __builtin_mul_overflow(n_rows - n_old, row_bytes(types.k, types.v), &bytes) ||
                             __builtin_mul_overflow(n_old, row_bytes(types.last_k(), types.last_v()), &old_bytes) ||
                             __builtin_add_overflow(bytes, old_bytes, &bytes);
    return is_too_much ? UINT64_MAX : bytes;
}

uint64_t kv_group::bytes() const { return spec_.layers.size() * layer_bytes(spec_, types_, n_rows_); }

uint64_t kv_group::bytes_on(ggml_backend_dev_t device) const {
    return std::accumulate(parts_.begin(), parts_.end(), uint64_t{0}, [&](uint64_t bytes, const kv_part & part) {
        return bytes + (part.device == device ? part.bytes : 0);
    });
}

// ggml takes other memory where it gets none of that type.
uint64_t kv_group::pinned_bytes_on(ggml_backend_dev_t device) const {
    uint64_t bytes = 0;
    for (const kv_part & part : parts_) {
        const bool wants = part.device == device && part.type != ggml_backend_dev_buffer_type(part.device);
        for (const ggml_tensor * rows : wants ? part.tensors : std::vector<ggml_tensor *>()) {
            bytes += ggml_backend_buffer_get_type(rows->buffer) == part.type ? ggml_nbytes(rows) : 0;
        }
    }
    return bytes;
}

size_t kv_group::place_of(uint32_t layer) const {
    return static_cast<size_t>(std::lower_bound(spec_.layers.begin(), spec_.layers.end(), layer) - spec_.layers.begin());
}

const kv_part & kv_group::part_of(uint32_t layer) const {
    return *std::find_if(parts_.begin(), parts_.end(), [&](const kv_part & part) {
        return std::binary_search(part.layers.begin(), part.layers.end(), layer);
    });
}

static ggml_tensor * heads(ggml_context * ctx, ggml_tensor * rows, uint32_t head_dim, uint32_t n_head_kv, uint32_t begin,
                           uint32_t n) {
    n = std::min(n, static_cast<uint32_t>(rows->ne[1]) - begin);
    return ggml_view_3d(ctx, rows, head_dim, n_head_kv, n, ggml_row_size(rows->type, head_dim), rows->nb[1],
                        rows->nb[1] * begin);
}

ggml_tensor * kv_group::k_heads(ggml_context * ctx, ggml_tensor * rows, uint32_t begin, uint32_t n) const {
    return heads(ctx, rows, spec_.head_dim_k, spec_.n_head_kv, begin, n);
}

ggml_tensor * kv_group::v_heads(ggml_context * ctx, ggml_tensor * rows, uint32_t begin, uint32_t n) const {
    return heads(ctx, rows, spec_.v_in_k > 0 ? spec_.v_in_k : spec_.head_dim_v, spec_.n_head_kv, begin, n);
}

// n rows of a tensor as floats.
static void read_floats(const ggml_tensor * rows, size_t n, float * out) {
    if (rows->type == GGML_TYPE_F32) {
        ggml_backend_tensor_get(rows, out, 0, n * rows->nb[1]);
        return;
    }
    std::vector<uint8_t> raw(n * rows->nb[1]);
    ggml_backend_tensor_get(rows, raw.data(), 0, raw.size());
    ggml_get_type_traits(rows->type)->to_float(raw.data(), out, static_cast<int64_t>(n) * rows->ne[0]);
}

void kv_group::read(uint32_t layer, bool v, float * out) const {
    const ggml_tensor * rows = v ? this->v(layer) : k(layer);
    const auto width = static_cast<size_t>(rows->ne[0]);
    const size_t n_first = ages() ? types_.n_fresh : cells_.size();
    read_floats(rows, n_first, out);
    if (ages()) {
        read_floats(v ? old_v(layer) : old_k(layer), cells_.size() - n_first, out + n_first * width);
    }
    const kv_part & part = part_of(layer);
    if (const hadamard * mixed = v ? part.hadamard_v.get() : part.hadamard_k.get()) {
        mixed->apply(out, cells_.size() * width);
    }
}

void kv_group::zero_rows(const kv_part & part, uint32_t n) {
    for (ggml_tensor * rows : part.tensors) {
        const std::vector<uint8_t> zeros(std::min<size_t>(MAX_ZEROS, n * rows->nb[1]));
        for (size_t done = 0; done < n * rows->nb[1]; done += zeros.size()) {
            ggml_backend_tensor_set(rows, zeros.data(), done, std::min(zeros.size(), n * rows->nb[1] - done));
        }
    }
}

// What is left in empty cells is multiplied by 0 whenever a span goes over them, and 0 times infinity is NaN: one overflow would
// outlive clear(). Only rows that were written since the last one are zeroed, which costs less than writing them did. Where rows age, all
// are zeroed: cells() doesn't tell which old rows were written.
void kv_group::clear(bool data) {
    const uint32_t n_touched = cells_.n_touched();
    const bool all = data || broken_ || ages();
    cells_.clear();
    broken_ = true; // until the rows are zero
    for (const kv_part & part : parts_) {
        if (all) {
            ggml_backend_buffer_clear(part.buffer.get(), 0);
        } else {
            zero_rows(part, n_touched);
        }
    }
    broken_ = false;
}

} // namespace kvg
