#include "memory/row_io.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"

namespace kvg {

static constexpr size_t MIN_SHARED_COPY = 1u << 20; // bytes from which starting threads pays

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

std::vector<cell_span> runs_of(const std::vector<uint32_t> & cells) {
    std::vector<cell_span> runs;
    each_run(cells, [&](uint32_t first, size_t n, size_t) { runs.push_back({first, static_cast<uint32_t>(n)}); });
    return runs;
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
    write_only_rows_of(rows, cells, data);
}

void write_only_rows_of(ggml_tensor * rows, const std::vector<uint32_t> & cells, const uint8_t * data) {
    const size_t size = rows->nb[1];
    each_run(cells, [&](uint32_t first, size_t n, size_t at) {
        ggml_backend_tensor_set(rows, data + at * size, first * size, n * size);
    });
}

uint64_t rows_bytes(const kv_group & group, const layer_range & range, uint64_t n_cells) {
    return range.size() * n_cells * (group.k_row_bytes() + group.v_row_bytes());
}

// Calls visit(tensor, offset of its rows) for all K and V of the layers; for those in host memory on several threads when there is much
// to copy, the last ones first if asked for.
template <class F>
static void each_tensor(const kv_group & group, const layer_range & range, size_t n_rows, int n_threads, bool from_end,
                        F visit) {
    const size_t n_kinds = group.spec().v_in_k > 0 ? 1 : 2;
    const auto tensor = [&](size_t i) {
        const uint32_t layer = group.layers()[range.begin + i / n_kinds];
        return i % n_kinds ? group.v(layer) : group.k(layer);
    };
    std::vector<size_t> begin(n_kinds * range.size() + 1);
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

void read_rows(const kv_group & group, const layer_range & range, const std::vector<uint32_t> & cells, uint8_t * out,
               int n_threads) {
    each_tensor(group, range, cells.size(), n_threads, false,
                [&](const ggml_tensor * rows, size_t begin) { read_rows_of(rows, cells, out + begin); });
}

void write_rows(kv_group & group, const layer_range & range, const std::vector<uint32_t> & cells, const uint8_t * data,
                int n_threads) {
    // the end of what was checked just now is still in the CPU's cache
    each_tensor(group, range, cells.size(), n_threads, true,
                [&](ggml_tensor * rows, size_t begin) { write_rows_of(rows, cells, data + begin); });
}

} // namespace kvg
