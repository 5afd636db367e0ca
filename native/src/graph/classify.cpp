#include "graph/classify.h"

#include "device.h"
#include "error.h"
#include "fault.h"
#include "graph/block/norm.h"
#include "graph/builder.h"
#include "host_memory.h"

namespace kvg {

static constexpr size_t MAX_TENSORS = 64; // of the graph, weights included

// ggml's own products: those of builder::linear() want the team that decodes.
static ggml_tensor * product(builder & b, ggml_tensor * x, ggml_tensor * weight, ggml_tensor * bias) {
    x = ggml_mul_mat(b.ctx(), weight, x);
    return bias ? ggml_add(b.ctx(), x, bias) : x;
}

static ggml_tensor * scores_of(builder & b, const model & of, ggml_tensor * x) {
    const hparams & h = of.hparams();
    const role_tensors & w = of.frame();
    if (ggml_tensor * hidden = w[role::class_hidden]) {
        x = product(b, x, hidden, w[role::class_hidden_bias]);
        x = h.classifier.gelu ? ggml_gelu(b.ctx(), x) : ggml_tanh(b.ctx(), x);
        x = norm(b, norm_kind::layer, x, w[role::class_norm], h.norm_eps);
    }
    x = product(b, x, w[role::class_out], w[role::class_out_bias]);
    switch (h.classifier.end) {
    case classifier_end::none:
        return x;
    case classifier_end::tanh:
        return ggml_tanh(b.ctx(), x);
    case classifier_end::softmax:
        return ggml_soft_max(b.ctx(), x);
    }
    return x;
}

void classify(const model & of, ggml_backend_t cpu, const float * states, uint32_t n, float * scores) {
    const hparams & h = of.hparams();
    if (h.classifier.n_classes == 0 || !of.frame()[role::class_out]) { // a stage that isn't the last has none
        fail(KVG_UNSUPPORTED, "%s: the model has no classifier ('cls.output.weight'), so that it is no reranker",
             of.file().path().c_str());
    }
    if (n == 0) {
        return;
    }
    const std::vector<active_adapter> no_adapters; // libllama adds none here
    builder b(no_adapters);
    ggml_tensor * in = b.input("pooled", GGML_TYPE_F32, h.n_embd, n);
    ggml_tensor * out = scores_of(b, of, in);
    ggml_set_output(out);
    b.root(out);
    ggml_cgraph * graph = b.finish();
    const uint64_t widest = uint64_t{n} * (h.n_embd + h.classifier.n_classes) * sizeof(float);
    require_host_memory(TABLES_PER_TENSOR * MAX_TENSORS + 4 * widest, "scores of texts");
    const ggml_gallocr_ptr memory(ggml_gallocr_new(ggml_backend_get_default_buffer_type(cpu)));
    const bool done = ggml_gallocr_alloc_graph(memory.get(), graph) && computed([&] {
                          ggml_backend_tensor_set(in, states, 0, ggml_nbytes(in));
                          return ggml_backend_graph_compute(cpu, graph);
                      });
    if (!done || fault_hit("classify")) {
        fail(KVG_DEVICE, "the CPU failed to compute the scores of %u texts", n);
    }
    ggml_backend_tensor_get(out, scores, 0, ggml_nbytes(out));
}

} // namespace kvg
