#include "graph/block/assistant.h"

namespace kvg {

ggml_tensor * assistant_begin(builder & b, const model & of, ggml_tensor * tokens, ggml_tensor * states) {
    const model & target = *of.target();
    ggml_tensor * x = b.embeddings(target.frame()[role::token_embd], tokens);
    x = ggml_scale(b.ctx(), x, target.hparams().embedding_scale);
    b.wish(target.embedding_device());
    x = b.product(ggml_concat(b.ctx(), x, states, 0), of.frame()[role::draft_in]);
    b.wish(of.placement().layer(0));
    return x;
}

ggml_tensor * assistant_state(builder & b, const model & of, ggml_tensor * x) {
    return b.product(x, of.frame()[role::draft_out]);
}

} // namespace kvg
