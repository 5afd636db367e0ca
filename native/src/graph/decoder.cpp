#include "graph/decoder.h"

#include <algorithm>
#include <chrono>

#include "device.h"
#include "error.h"
#include "fault.h"
#include "memory/cache_type.h"

namespace kvg {

static attention_kind choose(int32_t wanted, ggml_backend_dev_t device, const hparams & h, const kv_cache & cache) {
    const bool can = can_flash_on(device, h, cache.type_k(), cache.type_v());
    if (wanted == KVG_FLASH_ATTN_ON) {
        if (!can) {
            fail(KVG_UNSUPPORTED,
                 "device %s has no flash attention for heads of %u and this cache type; use flash_attn=\"auto\"",
                 ggml_backend_dev_name(device), h.head_dim);
        }
        return attention_kind::flash;
    }
    if (is_cpu(device)) {
        return attention_kind::attend;
    }
    // a remote device can't be asked, and would end its server; every backend has what the plain one is made of
    if (wanted == KVG_FLASH_ATTN_AUTO && can && !is_rpc(device)) {
        return attention_kind::flash;
    }
    // what it has not for common types, the CPU does in its place; others must be read where they lie
    const bool common = is_common(cache.type_k()) && is_common(cache.type_v());
    if (!common && !can_plain_on(device, h, cache.type_k(), cache.type_v())) {
        fail(
            KVG_UNSUPPORTED,
            "device %s has no attention for heads of %u over K in %s and V in %s%s; use \"f16\" for both, or offload_kqv=False",
            ggml_backend_dev_name(device), h.head_dim, ggml_type_name(cache.type_k()), ggml_type_name(cache.type_v()),
            can ? " without flash_attn" : "");
    }
    return attention_kind::plain;
}

// the scheduler's table holds a graph's leafs (weights, inputs) beside its nodes, and there are fewer leafs than nodes
decoder::decoder(const model & model, const kv_cache & cache, const backends & backends, const decoder_params & params)
    : model_(model), cache_(cache), n_ubatch_(params.n_ubatch),
      scheduler_(backends, 2 * decode_graph::max_nodes(model.hparams())) {
    for (uint32_t il = 0; il < cache.n_layer(); ++il) {
        kinds_.push_back(choose(params.flash_attn, cache.device(il), model.hparams(), cache));
    }
    const auto n_attend = std::count(kinds_.begin(), kinds_.end(), attention_kind::attend);
    any_span_ = n_attend == static_cast<ptrdiff_t>(kinds_.size());
    if (n_attend > 0) {
        attend_ = std::make_unique<attend_workspace>(model.hparams(), cache.n_rows(), params.max_threads);
    }
    if (any_span_ && ggml_is_quantized(cache.type_k())) {
        turns_ = std::make_unique<query_turns>(
            cache, rotation{model.hparams().rope, model.rope_freqs(cache.device(0)), cache.hadamard_k(0)});
    }
}

decode_shape decoder::largest() const { return {n_ubatch_, 1, 0, cache_.n_rows()}; }

std::vector<size_t> decoder::estimate() {
    return with_workspace(scheduler_.estimate(decode_graph(model_, cache_, kinds_, attend_.get(), largest())));
}

void decoder::reserve() {
    const decode_graph graph(model_, cache_, kinds_, attend_.get(), largest());
    if (!scheduler_.reserve(graph)) {
        fail(KVG_DEVICE, "%s has no memory for a graph of %u tokens over %u cells; use a smaller n_ubatch or n_ctx",
             model_.placement().name().c_str(), n_ubatch_, cache_.n_rows());
    }
}

std::vector<size_t> decoder::sizes() const { return with_workspace(scheduler_.sizes()); }

std::vector<size_t> decoder::with_workspace(std::vector<size_t> sizes) const {
    sizes.back() += attend_ ? attend_->bytes() : 0;
    return sizes;
}

decode_graph & decoder::prepare(uint32_t n_tokens, uint32_t n_outputs, const cell_span & span) {
    const decode_shape shape = any_span_ ? decode_shape{n_tokens, n_outputs, 0, cache_.n_rows()}
                                         : decode_shape{n_tokens, n_outputs, span.begin, span.n};
    if (attend_) {
        attend_->set_span(any_span_ ? span : cell_span{0, span.n}); // of what the graph shows it
    }
    if (graph_ && graph_->shape() == shape) {
        return *graph_;
    }
    graph_.reset();
    auto graph = std::make_unique<decode_graph>(model_, cache_, kinds_, attend_.get(), shape);
    if (!scheduler_.allocate(*graph)) {
        fail(KVG_DEVICE,
             "%s has no memory for a graph of %u tokens with %u outputs over %u cells; ask for fewer logits at a time",
             model_.placement().name().c_str(), shape.n_tokens, shape.n_outputs, shape.n_kv);
    }
    graph_ = std::move(graph);
    return *graph_;
}

void decoder::set_turns() {
    if (turns_) {
        attend_->set_turns(turns_->list());
    }
}

void decoder::compute() {
    const auto start = std::chrono::steady_clock::now();
    const bool done = scheduler_.compute(*graph_);
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!done || fault_hit("compute")) {
        graph_.reset();
        fail(KVG_DEVICE, "%s failed while decoding; the batch's tokens are not in the cache",
             model_.placement().name().c_str());
    }
}

std::string decoder::attention_on(ggml_backend_dev_t device) const {
    for (uint32_t il = 0; il < cache_.n_layer(); ++il) {
        if (cache_.device(il) == device) {
            return kinds_[il] == attention_kind::flash ? "flash" : kinds_[il] == attention_kind::plain ? "plain" : "attend";
        }
    }
    return "";
}

std::string decoder::refused_by(ggml_backend_dev_t device) const {
    return decode_graph(model_, cache_, kinds_, attend_.get(), largest()).refused_by(device);
}

} // namespace kvg
