// Models.
#include <algorithm>

#include "api/handles.h"
#include "api/model.h"
#include "runtime/bounded.h"

using namespace kvg;

void kvg::fill_info(kvg_model_info & out, const hparams & h, const tensor_totals & totals) {
    out.arch = h.arch.c_str();
    out.n_layer = h.n_layer();
    out.n_embd = h.n_embd;
    out.n_head = out.n_head_kv = out.head_dim = 0;
    for (const layer_spec & layer : h.layers) {
        out.n_head = std::max<int64_t>(out.n_head, layer.n_head);
        out.n_head_kv = std::max<int64_t>(out.n_head_kv, layer.n_head_kv);
        out.head_dim = std::max<int64_t>(out.head_dim, layer.head_dim_k);
    }
    out.n_vocab = h.n_vocab;
    out.n_ctx_train = h.n_ctx_train;
    out.n_params = totals.n_params;
    out.weight_bytes = totals.bytes;
    out.layer_begin = h.here.begin;
    out.layer_end = h.here.end;
    out.encodes = h.encodes;
    out.n_classes = h.is_last() ? h.classifier.n_classes : 0;
    out.classifies_by_mean = h.classifier.of_mean;
    out.n_draft_heads = static_cast<int32_t>(h.n_draft_heads);
    out.has_draft_head = h.has_draft_head;
    out.n_embd_target = h.n_embd_target;
}

void kvg::fill_layer(kvg_layer_info & out, const hparams & h, int64_t layer) {
    const layer_spec & spec = h.layers[static_cast<size_t>(bounded("layer", layer, 0, int64_t{h.n_layer()} - 1))];
    out = {sizeof(out),
           spec.has_attention() ? int64_t{spec.group} : -1,
           static_cast<int32_t>(spec.state.kind),
           spec.n_head,
           spec.n_head_kv,
           spec.head_dim_k,
           spec.head_dim_v,
           spec.window,
           spec.rope.n_rot,
           spec.kv_from,
           static_cast<int64_t>(spec.state.floats() * sizeof(float))};
}

std::vector<key_override> kvg::overrides_of(const kvg_override * overrides, int64_t n) {
    std::vector<key_override> all;
    for (int64_t i = 0; i < n; ++i) {
        const kvg_override & each = need_struct(&need(overrides, "overrides") + i, "override");
        key_override made = {&need(each.key, "override->key"), {}};
        switch (bounded("type", each.type, KVG_OVERRIDE_INT, KVG_OVERRIDE_STR)) {
        case KVG_OVERRIDE_INT:
            made.value = each.integer;
            break;
        case KVG_OVERRIDE_FLOAT:
            made.value = each.number;
            break;
        case KVG_OVERRIDE_BOOL:
            made.value = each.integer != 0;
            break;
        default:
            made.value = std::string(&need(each.text, "override->text"));
        }
        all.push_back(std::move(made));
    }
    return all;
}

std::shared_ptr<const model> kvg::load_model(const char * path, const kvg_model_params * params, loading how) {
    const kvg_model_params & p = need_struct(params, "params");
    placement_request request = {&need(p.devices, "params->devices"), p.n_gpu_layers, {}};
    if (p.n_split < 0) {
        fail(KVG_INVALID_ARGUMENT, "n_split is %lld, expected the number of shares", static_cast<long long>(p.n_split));
    }
    if (p.n_split > 0) {
        request.split.assign(&need(p.tensor_split, "params->tensor_split"), p.tensor_split + p.n_split);
    }
    auto made = std::make_shared<model>(&need(path, "path"), request, how, overrides_of(p.overrides, p.n_overrides),
                                        stage_request{p.layer_begin, p.layer_end}, p.draft_heads != 0);
    if (p.assistant) {
        made->load_assistant(p.assistant);
    }
    return made;
}

kvg_status kvg_model_load(const char * path, const kvg_model_params * params, kvg_model ** out) {
    return guarded([&] {
        need(out, "out") = nullptr;
        const auto model = load_model(path, params, loading::read);
        const std::shared_ptr<const gguf_file> file(model, &model->file());
        std::string kept;
        for (const std::string & reason : model->kept_on_cpu()) {
            kept += reason + "\n";
        }
        *out = std::make_unique<kvg_model>(kvg_model{model, {file}, model->placement().name(), kept}).release();
    });
}

void kvg_model_free(kvg_model * model) { std::unique_ptr<kvg_model>{model}.reset(); }

kvg_status kvg_model_get_info(const kvg_model * model, kvg_model_info * out) {
    return guarded([&] {
        kvg_model_info & info = need_struct(out, "out");
        const class model & m = *need(model, "model").model;
        fill_info(info, m.hparams(), m.totals());
        info.device = model->device.c_str();
        info.kept_on_cpu = model->kept_on_cpu.empty() ? nullptr : model->kept_on_cpu.c_str();
    });
}

kvg_status kvg_model_layer_device(const kvg_model * model, int64_t layer, const char ** out) {
    return guarded([&] {
        const class model & m = *need(model, "model").model;
        const placement & placement = m.placement();
        if (layer < 0 || layer > placement.n_layer()) {
            fail(KVG_INVALID_ARGUMENT, "layer is %lld, expected 0 to %u", static_cast<long long>(layer), placement.n_layer());
        }
        const auto il = static_cast<uint32_t>(layer);
        const bool is_here = il == placement.n_layer() ? m.hparams().is_last() : m.hparams().here.has(il);
        need(out, "out") = is_here ? ggml_backend_dev_name(placement.layer(il)) : "";
    });
}

kvg_status kvg_model_get_layer(const kvg_model * model, int64_t layer, kvg_layer_info * out) {
    return guarded([&] {
        const hparams & h = need(model, "model").model->hparams();
        fill_layer(need_struct(out, "out"), h, layer);
    });
}

const kvg_gguf * kvg_model_gguf(const kvg_model * model) { return model ? &model->gguf : nullptr; }
