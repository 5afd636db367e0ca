#include "graph/decoder.h"

#include <algorithm>
#include <chrono>

#include "device.h"
#include "error.h"
#include "fault.h"
#include "memory/cache_type.h"

namespace kvg {

static attention_kind choose(int32_t wanted, ggml_backend_dev_t device, const layer_spec & layer, cache_types types) {
    types.v = layer.v_in_k() > 0 ? types.k : types.v;
    const bool can = can_flash_on(device, layer, types);
    if (wanted == KVG_FLASH_ATTN_ON) {
        if (!can) {
            fail(KVG_UNSUPPORTED,
                 "device %s has no flash attention for heads of %u and this cache type; use flash_attn=\"auto\"",
                 ggml_backend_dev_name(device), layer.head_dim_k);
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
    const bool common = is_common(types.k) && is_common(types.v);
    if (!common && !can_plain_on(device, layer, types)) {
        fail(
            KVG_UNSUPPORTED,
            "device %s has no attention for heads of %u over K in %s and V in %s%s; use \"f16\" for both, or offload_kqv=False",
            ggml_backend_dev_name(device), layer.head_dim_k, ggml_type_name(types.k), ggml_type_name(types.v),
            can ? " without flash_attn" : "");
    }
    return attention_kind::plain;
}

// The layers whose states the CPU updates.
static std::vector<layer_spec> with_own_states(const std::vector<layer_spec> & layers, const kv_cache & cache) {
    std::vector<layer_spec> own;
    for (uint32_t il = 0; il < layers.size(); ++il) {
        if (layers[il].recurs() && cache.states().rows().is_on_host(il)) {
            own.push_back(layers[il]);
        }
    }
    return own;
}

decoder::decoder(const model & model, const kv_cache & cache, const backends & backends, const decoder_params & params,
                 std::vector<active_adapter> adapters)
    : model_(model), cache_(cache), backends_(backends), n_ubatch_(params.n_ubatch), n_outputs_(params.n_outputs),
      observed_(cache.groups().size()), recur_workspace_(with_own_states(model.hparams().layers, cache), params.max_threads),
      adapters_(std::move(adapters)), taps_(cache) {
    for (const kv_group & group : cache.groups()) {
        attended_.push_back({false, false, {}, {}, seen_ranges(seen_ranges::shortest(group.spec().n_head_kv))});
    }
    choose_attentions(params.flash_attn, params.max_threads);
    make_recurs();
    const auto is_own = [](const layer_attention & each) {
        return each.kind != attention_kind::flash && each.kind != attention_kind::plain;
    };
    any_span_ = std::all_of(attentions_.begin(), attentions_.end(), is_own) &&
                std::all_of(of_assistant_.begin(), of_assistant_.end(), is_own);
    for (attended_cells & each : attended_) {
        each.goes_by_order = any_span_;
    }
    // a stage without attention lets cells wait as the others do: all have the same cells
    const bool is_attended =
        std::any_of(model.hparams().layers.begin(), model.hparams().layers.end(),
                    [](const layer_spec & l) { return l.attends() || (l.elsewhere && l.has_attention()); });
    const bool any_quantized = std::any_of(cache.groups().begin(), cache.groups().end(),
                                           [](const kv_group & group) { return ggml_is_quantized(group.types().last_k()); });
    can_rotate_queries_ = any_span_ && is_attended && any_quantized;
    make_graph_cache();
    carrier_ = cache.working() ? std::make_unique<class carrier>(cache, backends) : nullptr;
}

void decoder::make_recurs() {
    const state_rows & rows = cache_.states().rows();
    const hparams & h = model_.hparams();
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        const bool is_own = h.layers[il].recurs() && rows.is_on_host(il);
        recurs_.push_back(
            is_own ? &recur_ops_.emplace_back(h.layers[il].state, h.norm_eps, rows.host_offset(il), runs_, recur_workspace_)
                   : nullptr);
    }
}

decode_shape decoder::largest_of_drafts() const {
    decode_shape shape = largest();
    shape.state_groups.clear();
    shape.in_order = shape.drafts = true;
    shape.n_outputs = shape.n_tokens;
    return shape;
}

// Of the largest graph with so many groups of states.
size_t decoder::max_tensors() const {
    decode_shape shape = largest();
    if (!shape.state_groups.empty()) {
        const uint32_t n = std::min(n_ubatch_, n_state_groups_);
        shape.state_groups.assign(n - 1, {1, 1});
        shape.state_groups.push_back({1, n_ubatch_ - (n - 1)});
    }
    int n_nodes = ggml_graph_n_nodes(make_graph(shape)->graph());
    if (model_.drafts()) {
        n_nodes = std::max(n_nodes, ggml_graph_n_nodes(make_graph(largest_of_drafts())->graph()));
    }
    // leafs (weights, inputs) are counted, too, and there are fewer of them than nodes
    return 2 * static_cast<size_t>(n_nodes);
}

void decoder::make_graph_cache() {
    const size_t n_tensors = max_tensors();
    if (graphs_ && n_tensors <= graphs_->max_tensors()) {
        graphs_->forget();
        return;
    }
    const bool is_first = !graphs_;
    auto made = std::make_unique<graph_cache>(backends_, n_tensors);
    graphs_ = std::move(made); // the memory of the one before is free again
    if (!is_first) {
        reserve();
    }
}

void decoder::adapt(std::vector<active_adapter> adapters) {
    adapters_.swap(adapters);
    try {
        make_graph_cache();
    } catch (...) {
        adapters_.swap(adapters);
        graphs_->forget(); // one that is larger than it need be serves, too
        throw;
    }
}

void decoder::choose_attentions(int32_t flash_attn, int max_threads) {
    const model * assistant = model_.assistant();
    std::vector<layer_spec> all = model_.hparams().layers;
    if (assistant) {
        all.insert(all.end(), assistant->hparams().layers.begin(), assistant->hparams().layers.end());
    }
    const auto chosen = [&](const layer_spec & layer) -> layer_attention {
        if (!layer.attends()) {
            return {attention_kind::none, nullptr, 0.0f, 0.0f, 0.0f};
        }
        const attention_kind kind = choose(flash_attn, cache_.reader(layer.kv_from), layer, cache_.types());
        if (kind == attention_kind::attend && !workspace_) {
            workspace_ = std::make_unique<attend_workspace>(all, cache_.max_rows(), max_threads);
        }
        if (kind != attention_kind::attend) {
            cache_.require_one_type("attention by ggml, which a device and flash_attn want");
        }
        const kv_group & group = cache_.groups()[layer.group];
        const old_rows old = {group.old_k(layer.kv_from), group.old_v(layer.kv_from), group.n_fresh()};
        if (kind == attention_kind::attend) {
            attended_[layer.group].has_own = true;
        }
        attend_op * op =
            kind == attention_kind::attend ? &ops_.emplace_back(layer, attended_[layer.group], *workspace_, old) : nullptr;
        return {kind, op, layer.scale, layer.soft_cap, layer.max_bias};
    };
    for (const layer_spec & layer : model_.hparams().layers) {
        attentions_.push_back(chosen(layer));
    }
    for (uint32_t il = 0; assistant && il < assistant->hparams().n_layer(); ++il) {
        of_assistant_.push_back(chosen(assistant->hparams().layers[il]));
    }
}

// An assistant drafts where there is one.
std::unique_ptr<decode_graph> decoder::make_graph(const decode_shape & shape) const {
    const model * assistant = shape.drafts ? model_.assistant() : nullptr;
    return std::make_unique<decode_graph>(assistant ? *assistant : model_, cache_, assistant ? of_assistant_ : attentions_,
                                          recurs_, adapters_, shape);
}

void decoder::set_waiting(const std::function<attend_rotations(uint32_t layer)> & of) {
    const auto tell = [&](const std::vector<layer_spec> & layers, const std::vector<layer_attention> & attentions) {
        for (size_t il = 0; il < layers.size(); ++il) {
            if (attentions[il].op) {
                attentions[il].op->set_waiting(of(layers[il].kv_from));
            }
        }
    };
    tell(model_.hparams().layers, attentions_);
    if (model_.assistant()) {
        tell(model_.assistant()->hparams().layers, of_assistant_);
    }
}

// Of so many tokens those groups of states that take the most memory. What all sequences have at once counts most: their states before and
// after a group, and those of the group before it, whose results are joined with its own.
std::vector<state_group> decoder::most_states(uint32_t n_tokens) const {
    const uint32_t n_seqs = std::min(cache_.n_seq_max(), n_tokens);
    if (!cache_.states().rows().any_on_device()) {
        return {};
    }
    if (n_seqs == n_tokens) {
        return {{n_seqs, 1}};
    }
    const uint32_t n_last = std::min(n_seqs, n_tokens - n_seqs);
    const uint32_t n_each = (n_tokens - n_last) / n_seqs;
    std::vector<state_group> groups = {{n_seqs, n_each}, {n_last, 1}};
    if (const uint32_t n_left = n_tokens - n_last - n_seqs * n_each; n_left > 0) {
        groups.push_back({1, n_left});
    }
    return groups;
}

// Over all cells, with as many outputs as there may be.
decode_shape decoder::shape_of(uint32_t n_tokens) const {
    decode_shape shape = {n_tokens,
                          std::min(n_tokens, n_outputs_),
                          {},
                          most_states(n_tokens),
                          cache_.n_seq_max() == 1 || !cache_.states().rows().any_on_device()};
    for (const kv_group & group : cache_.groups()) {
        shape.spans.push_back({0, group.n_rows()});
    }
    return shape;
}

std::vector<size_t> decoder::estimate() { return with_workspace(graphs_->estimate(*make_graph(largest()))); }

std::vector<size_t> decoder::most(bool exactly) const {
    const uint32_t n_small = std::min(n_ubatch_, graph_cache::SMALL_TOKENS);
    std::vector<size_t> sizes = graphs_->most(*make_graph(largest()), *make_graph(shape_of(n_small)), exactly);
    if (sizes.empty()) {
        fail_without_memory();
    }
    return with_workspace(std::move(sizes));
}

void decoder::reserve() {
    if (!graphs_->reserve(*make_graph(largest()), *make_graph(shape_of(1)))) {
        fail_without_memory();
    }
}

void decoder::fail_without_memory() const {
    fail(KVG_DEVICE, "%s has no memory for a graph of %u tokens over %u cells; use a smaller n_ubatch or n_ctx",
         model_.placement().name().c_str(), n_ubatch_, cache_.groups().front().n_rows());
}

std::vector<size_t> decoder::sizes() const { return with_workspace(graphs_->sizes()); }

std::vector<size_t> decoder::with_workspace(std::vector<size_t> sizes) const {
    sizes.back() += (workspace_ ? workspace_->bytes() : 0) + recur_workspace_.bytes();
    return sizes;
}

decode_graph & decoder::prepare(uint32_t n_tokens, uint32_t n_outputs, const std::vector<cell_span> & spans,
                                const state_segments & segments, bool drafts) {
    if (segments.groups.size() > n_state_groups_) {
        wait(); // for what is computed in the memory of the graphs so far
        n_state_groups_ = 2 * static_cast<uint32_t>(segments.groups.size());
        make_graph_cache();
    }
    decode_shape shape = {n_tokens,        n_outputs,           any_span_ ? largest().spans : spans,
                          segments.groups, segments.in_order(), drafts};
    for (size_t i = 0; i < spans.size(); ++i) {
        attended_[i].span = any_span_ ? spans[i] : cell_span{0, spans[i].n}; // of what the graph shows it
    }
    decode_graph * graph = graphs_->take(shape, [&] { return make_graph(shape); });
    if (!graph) {
        fail(KVG_DEVICE, "%s has no memory for a graph of %u tokens with %u outputs; use a smaller n_ubatch or n_ctx",
             model_.placement().name().c_str(), shape.n_tokens, shape.n_outputs);
    }
    return *graph;
}

void decoder::begin_observing() {
    for (observed_attention & each : observed_) {
        each = {};
    }
}

void decoder::observe(uint32_t from, uint32_t n_tokens, bool peaks) {
    for (size_t g = 0; from < n_tokens && g < observed_.size(); ++g) {
        const kv_group & group = cache_.groups()[g];
        observed_[g].peaks = peaks;
        observed_[g].n_rows = group.n_rows();
        observed_[g].of_head.resize(group.layers().size() * group.spec().n_head_kv * group.n_rows());
        observed_[g].n_queries.resize(group.layers().size());
    }
    for (uint32_t il = 0; il < attentions_.size(); ++il) {
        if (attentions_[il].op) {
            const size_t g = cache_.group_index_of(il);
            const std::vector<uint32_t> & layers = cache_.groups()[g].layers();
            const auto owner = std::lower_bound(layers.begin(), layers.end(), cache_.owner_of(il));
            attentions_[il].op->observe(from, n_tokens, &observed_[g], static_cast<size_t>(owner - layers.begin()));
        }
    }
}

void decoder::compute() {
    const auto start = std::chrono::steady_clock::now();
    const bool done = graphs_->compute(carrier_.get(), taps_.expect_any() ? &taps_ : nullptr);
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!done || fault_hit("compute")) {
        graphs_->drop();
        fail(KVG_DEVICE, "%s failed while decoding; the batch's tokens are not in the cache",
             model_.placement().name().c_str());
    }
}

void decoder::wait() {
    const auto start = std::chrono::steady_clock::now();
    const bool done = backends_.wait();
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!done) {
        graphs_->drop();
        fail(KVG_DEVICE, "%s failed while decoding; the batch's tokens are not in the cache",
             model_.placement().name().c_str());
    }
}

std::string decoder::attention_on(ggml_backend_dev_t device) const {
    for (uint32_t il = 0; il < cache_.n_layer(); ++il) {
        const attention_kind kind = attentions_[il].kind;
        if (kind != attention_kind::none && cache_.reader(il) == device) {
            return kind == attention_kind::flash ? "flash" : kind == attention_kind::plain ? "plain" : "attend";
        }
    }
    return "";
}

std::string decoder::refused_by(ggml_backend_dev_t device) const { return make_graph(largest())->refused_by(device); }

} // namespace kvg
