#include "graph/host_shift.h"

#include <algorithm>
#include <numeric>

#include "device.h"
#include "error.h"

namespace kvg {

host_shift::host_shift(update_runner & runner, const kv_cache & cache, const rotation & there, bool noisy)
    : runner_(runner), cache_(cache), graph_("shift", 2 * ROTATE_NODES) {
    if (there.mixed) {
        mixed_ = std::make_unique<hadamard>(cpu_device(), there.mixed->size());
        mixed_->allocate();
    }
    ggml_tensor * factors = nullptr;
    if (there.freq_factors) {
        std::vector<float> values(static_cast<size_t>(there.params.n_rot) / 2);
        ggml_backend_tensor_get(there.freq_factors, values.data(), 0, values.size() * sizeof(float));
        factors = graph_.input(values);
    }
    const uint32_t n = std::min(cache.cells().n_shifted(), max_rotated_rows(cache));
    std::vector<int32_t> all(n);
    std::iota(all.begin(), all.end(), 0);
    rows_ = graph_.input(cache.type_k(), int64_t{cache.n_head_kv()} * cache.head_dim(), n);
    inputs_ = {graph_.input(all), graph_.input(std::vector<int64_t>(all.begin(), all.end())), graph_.input(GGML_TYPE_I32, n, 1),
               noisy ? graph_.input(GGML_TYPE_I32, n, 1) : nullptr};
    graph_.add(rotate_rows(graph_.ctx(), rows_, cache.head_dim(), inputs_, {there.params, factors, mixed_.get()}));
    graph_.allocate(runner.host());
}

void host_shift::run(const kv_part & part) {
    for (waiting_rows & piece : list_waiting(cache_)) {
        const auto n = static_cast<size_t>(inputs_.by->ne[0]);
        piece.by.resize(n); // the last one may have fewer: the others are rotated by nothing
        piece.seeds.resize(n, -1);
        for (uint32_t il : part.layers) {
            rotate_piece(piece, cache_.k(il));
        }
    }
}

void host_shift::rotate_piece(const waiting_rows & piece, ggml_tensor * k) {
    std::vector<uint8_t> raw(ggml_nbytes(rows_));
    read_rows_of(k, piece.cells, raw.data());
    ggml_backend_tensor_set(rows_, raw.data(), 0, raw.size());
    ggml_backend_tensor_set(inputs_.by, piece.by.data(), 0, ggml_nbytes(inputs_.by));
    if (inputs_.seeds) {
        ggml_backend_tensor_set(inputs_.seeds, piece.seeds.data(), 0, ggml_nbytes(inputs_.seeds));
    }
    runner_.count_graph();
    if (!graph_.start(runner_.host()) || !graph_.finish(runner_.host())) {
        fail(KVG_DEVICE,
             "the K-shift failed half way on %s, which does it for another device: K can't be trusted any more; clear() the "
             "cache "
             "and decode again",
             ggml_backend_name(runner_.host().backend));
    }
    ggml_backend_tensor_get(rows_, raw.data(), 0, raw.size());
    write_rows_of(k, piece.cells, raw.data());
}

} // namespace kvg
