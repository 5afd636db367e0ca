#include <doctest/doctest.h>

#include <string>

#include "device.h"
#include "graph/attention.h"
#include "host_memory.h"
#include "naive_attention.h"

using namespace kvg;

namespace {

layer_spec layer_of(const attention_problem & p) {
    layer_spec layer = {};
    layer.n_head = p.s.n_head;
    layer.n_head_kv = p.s.n_head_kv;
    layer.head_dim_k = p.s.head_dim_k;
    layer.head_dim_v = p.s.head_dim_v;
    layer.scale = p.scale;
    layer.soft_cap = p.soft_cap;
    layer.sinks = !p.sinks.empty();
    return layer;
}

// The problem's tensors on the CPU, and a graph over them.
struct on_cpu {
    ggml_backend_ptr backend = open_backend(cpu_device());
    ggml_context_ptr inputs = new_ggml_context(8 * ggml_tensor_overhead());
    ggml_context_ptr nodes = new_ggml_context(64 * ggml_tensor_overhead() + ggml_graph_overhead());
    ggml_backend_buffer_ptr memory[2];
    ggml_tensor *q, *k, *v, *mask, *sinks;

    explicit on_cpu(const attention_problem & p) {
        const attention_sizes & s = p.s;
        q = ggml_new_tensor_3d(inputs.get(), GGML_TYPE_F32, s.head_dim_k, s.n_head, s.n_tokens);
        k = ggml_new_tensor_3d(inputs.get(), p.k.type, s.head_dim_k, s.n_head_kv, s.n_kv);
        v = ggml_new_tensor_3d(inputs.get(), p.v.type, s.head_dim_v, s.n_head_kv, s.n_kv);
        mask = ggml_new_tensor_2d(inputs.get(), GGML_TYPE_F16, s.n_kv, s.n_tokens);
        sinks = p.sinks.empty() ? nullptr : ggml_new_tensor_1d(inputs.get(), GGML_TYPE_F32, s.n_head);
        memory[0].reset(ggml_backend_alloc_ctx_tensors(inputs.get(), backend.get()));
        set(q, p.q.data());
        set(k, p.k.raw.data());
        set(v, p.v.raw.data());
        set(mask, p.mask.data());
        if (sinks) {
            set(sinks, p.sinks.data());
        }
    }
    static void set(ggml_tensor * t, const void * data) { ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t)); }

    std::vector<float> run(const layer_attention & how) {
        ggml_tensor * out = attention(nodes.get(), how, q, k, v, mask, sinks);
        ggml_cgraph * graph = ggml_new_graph(nodes.get());
        ggml_build_forward_expand(graph, out);
        memory[1].reset(ggml_backend_alloc_ctx_tensors(nodes.get(), backend.get()));
        REQUIRE(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS);
        CHECK(out->ne[0] == q->ne[1] * v->ne[0]);
        CHECK(out->ne[1] == q->ne[2]);
        std::vector<float> result(static_cast<size_t>(ggml_nelements(out)));
        ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
        return result;
    }
};

std::vector<float> by(attention_kind kind, const attention_problem & p) {
    const layer_spec layer = layer_of(p);
    attended_cells attended = {true, true, {0, p.s.n_kv}, {}, seen_ranges(256)};
    attended.ranges.find(p.mask.data(), p.s.n_tokens, p.s.n_kv);
    attend_workspace workspace({layer}, p.s.n_kv, GGML_DEFAULT_N_THREADS);
    attend_op op(layer, attended, workspace);
    return on_cpu(p).run({kind, kind == attention_kind::attend ? &op : nullptr, layer.scale, layer.soft_cap, layer.max_bias});
}

// All that can: ggml's flash attention rounds queries to K's type, and in F16 what it adds up.
void check_kinds(const attention_problem & p) {
    CAPTURE(p.s.head_dim_k);
    CAPTURE(p.s.head_dim_v);
    CAPTURE(p.s.n_tokens);
    CAPTURE(p.soft_cap);
    CAPTURE(p.sinks.size());
    CAPTURE(std::string(ggml_type_name(p.k.type)));
    const std::vector<double> expected = naive_attention(p);
    const bool exact = p.k.type == GGML_TYPE_F32;
    CHECK(worst(by(attention_kind::attend, p), expected) < 2e-5);
    CHECK(worst(by(attention_kind::flash, p), expected) < (exact ? 2e-5 : p.k.type == GGML_TYPE_F16 ? 2e-2 : 6e-2));
    if (can_plain_on(cpu_device(), layer_of(p), {p.k.type, p.v.type, false})) {
        CHECK(worst(by(attention_kind::plain, p), expected) < (exact ? 2e-5 : 1e-2));
    } else {
        CHECK(ggml_is_quantized(p.v.type));
    }
}

} // namespace

TEST_CASE("every kind of attention knows soft caps, sinks, and heads of K and V of different width") {
    const attention_sizes shapes[] = {
        {64, 64, 4, 2, 1, 70},   {192, 128, 6, 2, 3, 70},  {96, 64, 4, 1, 70, 300},
        {64, 128, 4, 4, 2, 600}, {128, 96, 8, 2, 1, 1100},
    };
    std::mt19937 random(1);
    for (const attention_sizes & s : shapes) {
        for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
            for (const float soft_cap : {0.0f, 50.0f, 5.0f}) {
                for (const bool sinks : {false, true}) {
                    attention_problem p(s, type, 0.7, random);
                    p.soft_cap = soft_cap;
                    p.sinks.assign(sinks ? s.n_head : 0, 2.0f);
                    if (sinks) {
                        p.sinks[1] = 9.0f;
                        p.sinks[2] = -40.0f;
                    }
                    check_kinds(p);
                }
            }
        }
    }
}
