#include "memory/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "device.h"
#include "error.h"
#include "host_memory.h"
#include "parallel.h"

namespace kvg {

static constexpr uint64_t MAX_ZEROS = 4ull << 20;   // bytes written at a time
static constexpr size_t MIN_SHARED_COPY = 1u << 20; // bytes from which starting threads pays

// Rows for n_cells, padded.
static uint32_t padded(uint32_t n_cells) { return (n_cells + MAX_SPAN_ALIGN - 1) / MAX_SPAN_ALIGN * MAX_SPAN_ALIGN; }

// Refuses a cache that the devices or the host can't hold: a kernel that overcommits would kill the process later, when the memory is
// touched.
static uint32_t require_room(const std::vector<ggml_backend_dev_t> & devices, const hparams & h, uint32_t n_cells,
                             uint32_t n_seq_max, ggml_type type_k, ggml_type type_v) {
    const uint64_t row = ggml_row_size(type_k, h.n_embd_kv()) + ggml_row_size(type_v, h.n_embd_kv());
    std::map<ggml_backend_dev_t, uint64_t> needed;
    needed[cpu_device()] = n_cells * cells::bytes_per_cell(n_seq_max);
    for (ggml_backend_dev_t device : devices) {
        uint64_t & bytes = needed[device];
        if (__builtin_add_overflow(bytes, row * padded(n_cells), &bytes)) {
            bytes = UINT64_MAX;
        }
    }
    for (const auto & [device, bytes] : needed) {
        if (!has_room(device, bytes)) {
            fail(KVG_DEVICE,
                 "a cache of %u cells needs %s on %s and %s are free; use a smaller n_ctx or smaller types of K and V", n_cells,
                 format_bytes(bytes).c_str(), ggml_backend_dev_name(device), format_bytes(device_memory(device).free).c_str());
        }
    }
    return n_cells;
}

kv_cache::kv_cache(const std::vector<ggml_backend_dev_t> & devices, const hparams & h, uint32_t n_cells, uint32_t n_seq_max,
                   ggml_type type_k, ggml_type type_v, const hadamard_sizes & rotated, bool is_measured)
    : n_rows_(padded(n_cells)),
      cells_(is_measured ? 1 : require_room(devices, h, n_cells, n_seq_max, type_k, type_v), n_seq_max),
      n_head_kv_(h.n_head_kv), head_dim_(h.head_dim), devices_(devices), k_(h.n_layer), v_(h.n_layer) {
    for (uint32_t il = 0; il < h.n_layer; ++il) {
        const auto same = [&](const kv_part & part) { return part.device == devices[il]; };
        auto part = std::find_if(parts_.begin(), parts_.end(), same);
        if (part == parts_.end()) {
            parts_.push_back({devices[il], {}, {}, 0, nullptr, nullptr, nullptr, nullptr});
            part = parts_.end() - 1;
        }
        part->layers.push_back(il);
    }
    for (kv_part & part : parts_) {
        part.ctx = new_ggml_context(2 * part.layers.size() * ggml_tensor_overhead());
        ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(part.device);
        part.buffer.reset(ggml_backend_buft_alloc_buffer(type, 0));
        if (!part.buffer) {
            fail(KVG_DEVICE, "out of host memory for the cache's tensors");
        }
        for (uint32_t il : part.layers) {
            k_[il] = ggml_new_tensor_2d(part.ctx.get(), type_k, h.n_embd_kv(), n_rows_);
            ggml_format_name(k_[il], "cache_k_%u", il);
            part.tensors.push_back(k_[il]);
        }
        for (uint32_t il : part.layers) {
            v_[il] = ggml_new_tensor_2d(part.ctx.get(), type_v, h.n_embd_kv(), n_rows_);
            ggml_format_name(v_[il], "cache_v_%u", il);
            part.tensors.push_back(v_[il]);
        }
        part.bytes = ggml_backend_alloc_ctx_tensors_from_buft_size(part.ctx.get(), type);
        for (ggml_tensor * t : part.tensors) {
            t->buffer = part.buffer.get(); // says where it will be, and has no address
        }
        part.hadamard_k = rotated.k ? std::make_unique<hadamard>(part.device, rotated.k) : nullptr;
        part.hadamard_v = rotated.v ? std::make_unique<hadamard>(part.device, rotated.v) : nullptr;
    }
}

void kv_cache::allocate() {
    for (kv_part & part : parts_) {
        for (ggml_tensor * t : part.tensors) {
            t->buffer = nullptr;
        }
        part.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(part.ctx.get(), ggml_backend_dev_buffer_type(part.device)));
        if (!part.buffer) {
            fail(KVG_DEVICE, "%s refused %s for a cache of %u cells, with %s free; use a smaller n_ctx",
                 ggml_backend_dev_name(part.device), format_bytes(part.bytes).c_str(), cells_.size(),
                 format_bytes(device_memory(part.device).free).c_str());
        }
        part.bytes = ggml_backend_buffer_get_size(part.buffer.get());
        if (ggml_backend_buffer_is_host(part.buffer.get())) {
            advise_huge_pages(ggml_backend_buffer_get_base(part.buffer.get()), ggml_backend_buffer_get_size(part.buffer.get()));
        }
        for (hadamard * rotation : {part.hadamard_k.get(), part.hadamard_v.get()}) {
            if (rotation) {
                rotation->allocate();
            }
        }
    }
}

const kv_part & kv_cache::part_of(uint32_t layer) const {
    return *std::find_if(parts_.begin(), parts_.end(), [&](const kv_part & p) { return p.device == devices_[layer]; });
}

uint64_t kv_cache::bytes() const { return cell_bytes() * n_rows_; }

uint64_t kv_cache::bytes_on(ggml_backend_dev_t device) const {
    const auto part = std::find_if(parts_.begin(), parts_.end(), [&](const kv_part & p) { return p.device == device; });
    return part == parts_.end() ? 0 : part->bytes;
}

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
    if (const hadamard * rotated = v ? hadamard_v(layer) : hadamard_k(layer)) {
        rotated->apply(out, cells_.size() * static_cast<size_t>(width));
    }
}

// Calls visit(first cell, how many, which of `cells` it is) for each run of neighbouring cells.
template <class F> static void each_run(const std::vector<uint32_t> & cells, F visit) {
    size_t first = 0;
    for (size_t i = 1; i <= cells.size(); ++i) {
        if (i == cells.size() || cells[i] != cells[i - 1] + 1) {
            visit(cells[first], i - first, first);
            first = i;
        }
    }
}

// Each transfer takes long where memory is not the host's: beyond so many runs all of the span that they lie in is transferred, unless
// that is much more than they are.
static bool is_scattered(const ggml_tensor * rows, const std::vector<uint32_t> & cells) {
    constexpr size_t MAX_TRANSFERS = 16;
    constexpr size_t MAX_SPREAD = 4;
    if (cells.size() <= MAX_TRANSFERS || ggml_backend_buffer_is_host(rows->buffer)) {
        return false;
    }
    size_t n_runs = 0;
    each_run(cells, [&](uint32_t, size_t, size_t) { ++n_runs; });
    const auto [low, high] = std::minmax_element(cells.begin(), cells.end());
    return n_runs > MAX_TRANSFERS && *high - *low < MAX_SPREAD * cells.size();
}

// All rows from the lowest to the highest of these cells.
struct row_span {
    size_t begin;
    std::vector<uint8_t> bytes;

    row_span(const ggml_tensor * rows, const std::vector<uint32_t> & cells) {
        const auto [low, high] = std::minmax_element(cells.begin(), cells.end());
        begin = *low;
        bytes.resize((*high + 1 - begin) * rows->nb[1]);
        ggml_backend_tensor_get(rows, bytes.data(), begin * rows->nb[1], bytes.size());
    }
};

void read_rows_of(const ggml_tensor * rows, const std::vector<uint32_t> & cells, uint8_t * out) {
    const size_t size = rows->nb[1];
    if (is_scattered(rows, cells)) {
        const row_span span(rows, cells);
        each_run(cells, [&](uint32_t first, size_t n, size_t at) {
            memcpy(out + at * size, span.bytes.data() + (first - span.begin) * size, n * size);
        });
        return;
    }
    each_run(cells, [&](uint32_t first, size_t n, size_t at) {
        ggml_backend_tensor_get(rows, out + at * size, first * size, n * size);
    });
}

void write_rows_of(ggml_tensor * rows, const std::vector<uint32_t> & cells, const uint8_t * data) {
    const size_t size = rows->nb[1];
    if (is_scattered(rows, cells)) {
        row_span span(rows, cells); // with what lies between them, which goes back as it was
        each_run(cells, [&](uint32_t first, size_t n, size_t at) {
            memcpy(span.bytes.data() + (first - span.begin) * size, data + at * size, n * size);
        });
        ggml_backend_tensor_set(rows, span.bytes.data(), span.begin * size, span.bytes.size());
        return;
    }
    each_run(cells, [&](uint32_t first, size_t n, size_t at) {
        ggml_backend_tensor_set(rows, data + at * size, first * size, n * size);
    });
}

// Calls visit(tensor, offset of its rows) for all K and V; for those in host memory on several threads when there is much to copy, the
// last ones first if asked for.
template <class F> void kv_cache::each_tensor(size_t n_rows, int n_threads, bool from_end, F visit) const {
    const auto tensor = [&](size_t i) { return i % 2 ? v_[i / 2] : k_[i / 2]; };
    std::vector<size_t> begin(2 * n_layer() + 1);
    std::vector<size_t> on_host, elsewhere;
    size_t host_bytes = 0;
    for (size_t i = 0; i + 1 < begin.size(); ++i) {
        begin[i + 1] = begin[i] + n_rows * tensor(i)->nb[1];
        const bool is_host = ggml_backend_buffer_is_host(tensor(i)->buffer);
        (is_host ? on_host : elsewhere).push_back(i);
        host_bytes += is_host ? begin[i + 1] - begin[i] : 0;
    }
    const size_t n_shares = host_bytes >= MIN_SHARED_COPY ? static_cast<size_t>(n_threads) : 1;
    std::vector<size_t> order = on_host;
    if (from_end) {
        std::reverse(order.begin(), order.end());
    }
    parallel_for(order.size(), n_shares, [&](size_t i) { visit(tensor(order[i]), begin[order[i]]); });
    for (size_t i : elsewhere) {
        visit(tensor(i), begin[i]);
    }
}

void kv_cache::read_rows(const std::vector<uint32_t> & cells, uint8_t * out, int n_threads) const {
    each_tensor(cells.size(), n_threads, false,
                [&](const ggml_tensor * rows, size_t begin) { read_rows_of(rows, cells, out + begin); });
}

void kv_cache::write_rows(const std::vector<uint32_t> & cells, const uint8_t * data, int n_threads) {
    // the end of what was checked just now is still in the CPU's cache
    each_tensor(cells.size(), n_threads, true,
                [&](ggml_tensor * rows, size_t begin) { write_rows_of(rows, cells, data + begin); });
}

void kv_cache::zero_rows(const kv_part & part, uint32_t n) {
    for (ggml_tensor * rows : part.tensors) {
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
