#include "runtime/context.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "device.h"
#include "error.h"
#include "graph/classify.h"
#include "graph/recur_ggml.h"
#include "memory/aging.h"
#include "memory/cache_type.h"
#include "memory/move.h"
#include "runtime/bounded.h"

namespace kvg {

namespace {

constexpr int64_t MAX_CELLS =
    std::numeric_limits<int32_t>::max() - MAX_SPAN_ALIGN; // rows are padded, and indices go through int32
constexpr size_t SMALL_LOGITS = 16u << 20;                // bytes that are reserved unasked
constexpr int64_t MAX_THREADS = 512;                      // GGML_MAX_N_THREADS: beyond it ggml aborts

step_params check_step(const kvg_context_params & params, const hparams & h) {
    step_params out = {};
    bounded("n_ctx", params.n_ctx, 1, MAX_CELLS);
    out.n_batch = static_cast<uint32_t>(bounded("n_batch", params.n_batch, 1, MAX_CELLS));
    out.n_ubatch = static_cast<uint32_t>(
        std::min<int64_t>({bounded("n_ubatch", params.n_ubatch, 1, MAX_CELLS), params.n_batch, params.n_ctx}));
    const int64_t n_outputs = bounded("n_outputs_max", params.n_outputs_max, 0, MAX_CELLS);
    const int64_t n_small = std::min<int64_t>(out.n_ubatch, SMALL_LOGITS / (h.n_vocab * sizeof(float)));
    out.n_outputs = static_cast<uint32_t>(std::max<int64_t>({n_outputs, params.n_seq_max, graph_cache::SMALL_TOKENS, n_small}));
    if (!h.is_last()) { // the next stage takes all tokens
        out.n_outputs = out.n_ubatch;
    }
    if (h.encodes) { // a token sees those behind it, so that all of a text are computed at once
        out.n_ubatch = out.n_outputs = static_cast<uint32_t>(std::min(params.n_batch, params.n_ctx));
    }
    out.n_threads = static_cast<int>(bounded("n_threads", params.n_threads, 1, MAX_THREADS));
    out.n_threads_batch = static_cast<int>(bounded("n_threads_batch", params.n_threads_batch, 1, MAX_THREADS));
    return out;
}

// Of those layers n, or all: evenly, so that others can be copied while these are computed.
void keep_evenly(const std::vector<uint32_t> & layers, size_t n, kv_homes & homes) {
    n = std::min(n, layers.size());
    for (size_t i = 0; i < layers.size(); ++i) {
        if ((i + 1) * n / layers.size() > i * n / layers.size()) {
            homes.cells[layers[i]] = homes.readers[layers[i]];
        }
    }
}

// n layers whose K and V stay on their device: first those with a window, which take little memory there and as long a turn as others.
void keep_resident(const hparams & h, size_t n, kv_homes & homes) {
    std::vector<uint32_t> with_window;
    std::vector<uint32_t> others;
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        if (h.layers[il].attends() && h.layers[il].kv_from == il && homes.readers[il] != homes.cells[il]) {
            (h.layers[il].window > 0 ? with_window : others).push_back(il);
        }
    }
    keep_evenly(with_window, n, homes);
    keep_evenly(others, n - std::min(n, with_window.size()), homes);
}

// Where each layer's cells are, and who reads them.
kv_homes homes_of(const placement & placement, const hparams & h, const kvg_context_params & params) {
    bounded("kv_tier", params.kv_tier, KVG_KV_TIER_DEVICE, KVG_KV_TIER_HOST);
    bounded("device_layers", params.device_layers, 1, std::numeric_limits<int32_t>::max());
    const bool on_host = params.kv_tier == KVG_KV_TIER_HOST;
    if (on_host && !params.offload_kqv) {
        fail(KVG_INVALID_ARGUMENT,
             "kv_tier=\"host\" keeps cells in host memory and lets the device attend, and offload_kqv=False lets "
             "the CPU attend: use one of the two");
    }
    kv_homes homes;
    for (uint32_t il = 0; il < placement.n_layer(); ++il) {
        homes.readers.push_back(params.offload_kqv ? placement.layer(il) : cpu_device());
        homes.cells.push_back(on_host ? cpu_device() : homes.readers.back());
    }
    keep_resident(h, static_cast<size_t>(bounded("resident_layers", params.resident_layers, 0, MAX_CELLS)), homes);
    return homes;
}

// Where each layer's recurrent state is: on the device that computes the layer, if that can update it.
std::vector<ggml_backend_dev_t> homes_of_states(const placement & placement, const hparams & h,
                                                const kvg_context_params & params, const cache_size & size) {
    std::vector<ggml_backend_dev_t> homes(placement.n_layer(), cpu_device());
    const uint32_t n_rows = 2 * size.n_seq_max + size.kept_states(h);
    for (uint32_t il = 0; il < placement.n_layer() && params.offload_kqv; ++il) {
        if (h.layers[il].recurs() && can_recur_on(placement.layer(il), h.layers[il].state, n_rows)) {
            homes[il] = placement.layer(il);
        }
    }
    return homes;
}

// Before anything is allocated.
void require_kept(const std::vector<ggml_backend_dev_t> & devices, const hparams & h, const cache_types & types) {
    for (const group_spec & spec : h.groups) {
        for (const uint32_t il : spec.layers) {
            if (!can_keep_on(devices[il], spec, types)) {
                fail(KVG_UNSUPPORTED,
                     "device %s can't write or move rows of %u values of K in %s and V in %s; use offload_kqv=False, another "
                     "device or type_k/type_v=\"f16\"",
                     ggml_backend_dev_name(devices[il]), spec.k_width(), ggml_type_name(types.k), ggml_type_name(types.v));
            }
        }
    }
}

// What rows are stored as, and what they age to.
cache_types types_of(const kvg_context_params & params, const hparams & h) {
    cache_types types = {cache_type("type_k", params.type_k), cache_type("type_v", params.type_v), params.hadamard != 0};
    types.n_fresh = static_cast<uint32_t>(bounded("n_fresh", params.n_fresh, 0, MAX_CELLS));
    if (types.n_fresh == 0) {
        return types;
    }
    if (types.n_fresh % AGING_STEP != 0) {
        fail(KVG_INVALID_ARGUMENT, "n_fresh is %u, expected a multiple of %u", types.n_fresh, AGING_STEP);
    }
    types.old_k = cache_type("old_type_k", params.old_type_k);
    types.old_v = cache_type("old_type_v", params.old_type_v);
    const auto grows = [](ggml_type from, ggml_type to) {
        return from != to && ggml_row_size(to, 32) >= ggml_row_size(from, 32);
    };
    if (grows(types.k, types.old_k) || grows(types.v, types.old_v) || (types.k == types.old_k && types.v == types.old_v)) {
        fail(KVG_INVALID_ARGUMENT, "K in %s and V in %s age to %s and %s, expected smaller types", ggml_type_name(types.k),
             ggml_type_name(types.v), ggml_type_name(types.old_k), ggml_type_name(types.old_v));
    }
    if (params.n_batch > params.n_fresh && params.n_fresh < params.n_ctx) {
        fail(KVG_INVALID_ARGUMENT,
             "rows age after %u tokens, and a batch of up to %lld wants that many fresh cells at once; use a smaller "
             "n_batch, or let them age later",
             types.n_fresh, static_cast<long long>(params.n_batch));
    }
    const auto has_latent = [](const layer_spec & layer) { return layer.v_in_k() > 0; };
    if (h.n_draft_heads > 0 || std::any_of(h.layers.begin(), h.layers.end(), has_latent)) {
        fail(KVG_UNSUPPORTED,
             "rows can't age in the cache of a model with %s; use one type for K and one for V, as in type_k=\"f16\"",
             h.n_draft_heads > 0 ? "a draft head" : "latent K (MLA)");
    }
    return types;
}

// Of states, beside those that steps need. By default there is room for 8.
uint64_t checkpoint_bytes(const kvg_context_params & params, const hparams & h) {
    const uint64_t fallback = 8 * h.state_floats() * sizeof(float);
    return params.checkpoint_bytes == -1
               ? fallback
               : static_cast<uint64_t>(bounded("checkpoint_bytes", params.checkpoint_bytes, 0, int64_t{1} << 50));
}

} // namespace

context::context(std::shared_ptr<const model> model, const kvg_context_params & params, std::vector<active_adapter> adapters)
    : model_(std::move(model)) {
    step_params settings = check_step(params, model_->hparams());
    const auto n_seq_max = static_cast<uint32_t>(bounded("n_seq_max", params.n_seq_max, 1, MAX_SEQS));
    bounded("flash_attn", params.flash_attn, KVG_FLASH_ATTN_AUTO, KVG_FLASH_ATTN_ON);
    if (params.defrag_threshold != params.defrag_threshold) {
        fail(KVG_INVALID_ARGUMENT, "defrag_threshold is not a number");
    }
    const hparams & h = model_->hparams();
    const cache_types types = types_of(params, h);
    kv_homes homes = homes_of(model_->placement(), h, params);
    for (ggml_backend_dev_t device : homes.readers) {
        settings.align = std::max(settings.align, span_align(device));
    }
    for (const group_spec & spec : h.groups) {
        require_blocks_fit("type_k", types.k, spec.head_dim_k);
        require_blocks_fit("type_v", types.v, spec.head_dim_v);
        require_blocks_fit("type_k", types.last_k(), spec.head_dim_k);
        require_blocks_fit("type_v", types.last_v(), spec.head_dim_v);
    }
    require_kept(homes.readers, h, types);
    require_kept(homes.cells, h, types);
    const int max_threads = std::max(settings.n_threads, settings.n_threads_batch);
    backends_ = std::make_unique<backends>(model_->placement().devices());
    const auto checkpoint_cells = static_cast<uint32_t>(bounded("checkpoint_cells", params.checkpoint_cells, 0, MAX_CELLS));
    const cache_size size = {static_cast<uint32_t>(params.n_ctx),
                             settings.n_batch,
                             n_seq_max,
                             checkpoint_bytes(params, h),
                             checkpoint_cells,
                             params.swa_full != 0,
                             model_->is_measured(),
                             static_cast<uint32_t>(params.device_layers)};
    homes.states = homes_of_states(model_->placement(), h, params, size);
    cache_ = std::make_unique<kv_cache>(h, homes, *backends_, size, types);
    decoder_ = std::make_unique<decoder>(*model_, *cache_, *backends_,
                                         decoder_params{params.flash_attn, settings.n_ubatch, settings.n_outputs, max_threads},
                                         std::move(adapters));
    upkeep_ = std::make_unique<class upkeep>(*model_, *cache_, *backends_, decoder_->can_rotate_queries(),
                                             settings.n_threads_batch, params.defrag_threshold);
    if (model_->assistant() && cache_->working()) {
        fail(KVG_UNSUPPORTED, "an assistant reads the model's K and V where they lie: use kv_tier=\"device\", or leave it out");
    }
    if (model_->drafts()) {
        last_states_ = std::make_unique<last_states>(cache_->groups().front().cells(), h.n_embd);
        draft_step_ =
            std::make_unique<class draft_step>(*model_, *cache_, *backends_, *decoder_, *upkeep_, settings, *last_states_);
    }
    step_ = std::make_unique<class step>(*model_, *cache_, *backends_, *decoder_, *upkeep_, settings, last_states_.get());
    transfer_ = std::make_unique<class transfer>(*cache_, *upkeep_, settings.n_threads_batch);
    intake_ = std::make_unique<class intake>(*cache_);
    parts_ = list_parts(*model_, *cache_, *decoder_, *upkeep_);
    if (!model_->is_measured()) {
        cache_->allocate();
    }
    reserve_graphs(settings.n_ubatch);
    if (!model_->is_measured()) {
        cache_->clear(true); // not before all is well: that is when the host's pages become real
    }
}

// Memory for the largest graph, if there is room for it beside a cache that is allocated and not touched yet. A kernel that overcommits
// would kill the process later.
void context::reserve_graphs(uint32_t n_ubatch) {
    const std::vector<size_t> bytes = decoder_->estimate();
    bool fits = true;
    for (size_t i = 0; i < bytes.size(); ++i) {
        ggml_backend_dev_t device = ggml_backend_get_device(backends_->all()[i]);
        fits = fits && has_room(device, bytes[i] + (is_cpu(device) ? cache_->bytes_on(device) : 0));
        if (!fits && !model_->is_measured()) {
            fail(KVG_DEVICE, "graphs of %u tokens over %u cells need %s on %s and %s are free; use a smaller n_ubatch or n_ctx",
                 n_ubatch, cache_->groups().front().cells().size(), format_bytes(bytes[i]).c_str(),
                 ggml_backend_dev_name(device), format_bytes(device_memory(device).free).c_str());
        }
    }
    if (model_->is_measured()) {
        planned_bytes_ = decoder_->most(fits);
    } else {
        decoder_->reserve();
    }
}

void context::adapt(std::vector<active_adapter> adapters) {
    std::set<const adapter *> seen;
    for (const active_adapter & each : adapters) {
        const char * path = each.adapter->file().path().c_str();
        if (&each.adapter->of() != model_.get()) {
            fail(KVG_INVALID_ARGUMENT, "%s was loaded for another model than the context's; load it with this one", path);
        }
        if (!(std::abs(each.scale) <= 1e6f)) {
            fail(KVG_INVALID_ARGUMENT, "the scale of %s is %g, expected -1e6 to 1e6", path, static_cast<double>(each.scale));
        }
        if (!seen.insert(each.adapter.get()).second) {
            fail(KVG_INVALID_ARGUMENT, "%s is given twice", path);
        }
    }
    const auto is_idle = [](const active_adapter & each) { return each.scale == 0.0f; };
    adapters.erase(std::remove_if(adapters.begin(), adapters.end(), is_idle), adapters.end());
    decoder_->adapt(std::move(adapters));
}

void context::classify(const float * states, uint32_t n, float * scores) const {
    backends_->set_threads(1); // a few rows
    kvg::classify(*model_, backends_->cpu(), states, n, scores);
}

class draft_step & context::draft_step() {
    if (!draft_step_) {
        fail(KVG_UNSUPPORTED, "the model was loaded without a draft head: load it with draft_heads, or with an assistant");
    }
    return *draft_step_;
}

void context::clear(bool data) {
    intake_->forget_all();
    upkeep_->clear(data);
}

bool context::has_long_rope(size_t group) const { return model_->uses_long_factors(cache_->groups()[group].cells().size()); }

bool context::can_shift() const {
    const hparams & h = model_->hparams();
    const auto attends = [](const layer_spec & layer) { return layer.attends(); };
    const auto rotates = [](const layer_spec & layer) { return layer.rope.n_rot > 0; };
    const bool is_in_no_k = std::none_of(h.layers.begin(), h.layers.end(), attends) || h.tells_distances();
    return !h.learned_positions && (is_in_no_k || std::any_of(h.layers.begin(), h.layers.end(), rotates));
}

class trace & context::trace() {
    if (!decoder_->carrier()) {
        fail(KVG_UNSUPPORTED,
             "there is nothing to trace: K and V are where attention reads them. kv_tier=\"host\" copies them, for layers "
             "that are on a device");
    }
    return decoder_->carrier()->trace();
}

const std::vector<context_part> & context::parts() {
    const std::vector<size_t> sizes = model_->is_measured() ? planned_bytes_ : decoder_->sizes();
    for (size_t i = 0; i < parts_.size(); ++i) {
        parts_[i].compute_bytes = sizes[i];
    }
    parts_.back().compute_bytes += last_states_ ? last_states_->bytes() : 0;
    return parts_;
}

} // namespace kvg
