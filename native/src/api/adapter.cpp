// LoRA adapters.
#include "api/handles.h"

using namespace kvg;

kvg_status kvg_adapter_load(kvg_model * model, const char * path, kvg_adapter ** out) {
    return guarded([&] {
        need(out, "out") = nullptr;
        const auto made = std::make_shared<const adapter>(need(model, "model").model, &need(path, "path"));
        *out = std::make_unique<kvg_adapter>(kvg_adapter{made, {{made, &made->file()}}}).release();
    });
}

void kvg_adapter_free(kvg_adapter * adapter) { std::unique_ptr<kvg_adapter>{adapter}.reset(); }

kvg_status kvg_adapter_get_info(const kvg_adapter * adapter, kvg_adapter_info * out) {
    return guarded([&] {
        kvg_adapter_info & info = need_struct(out, "out");
        const class adapter & a = *need(adapter, "adapter").adapter;
        info = {sizeof(info), static_cast<int64_t>(a.n_pairs()), a.n_params(), a.bytes(), a.alpha()};
    });
}

const kvg_gguf * kvg_adapter_gguf(const kvg_adapter * adapter) { return adapter ? &adapter->gguf : nullptr; }

kvg_status kvg_context_set_adapters(kvg_context * context, kvg_adapter * const * adapters, const float * scales, int64_t n) {
    return on_context(context, [&](class context & c) {
        if (n < 0) {
            fail(KVG_INVALID_ARGUMENT, "n is %lld, expected the number of adapters", static_cast<long long>(n));
        }
        std::vector<active_adapter> active;
        for (int64_t i = 0; i < n; ++i) {
            const kvg_adapter & each = need((&need(adapters, "adapters"))[i], "adapter");
            active.push_back({each.adapter, (&need(scales, "scales"))[i]});
        }
        c.adapt(std::move(active));
    });
}
