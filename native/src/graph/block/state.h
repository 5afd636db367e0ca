// What a layer remembers in a state: between its norm and its output matrix.
#pragma once

#include "graph/builder.h"
#include "graph/recur.h"
#include "graph/recurrence.h"
#include "model/weights.h"

namespace kvg {

struct state_block {
    const model & of;
    uint32_t layer;
    recurrence & op;
    recur_op * own; // the same, of recur_kind::own; nullptr: it is of another kind
    bool gives;     // false where only the states matter

    // x: (n_embd, n_tokens), normed. Returns what the output matrix takes, (v_width or n_channels, n_tokens); nullptr: nothing
    ggml_tensor * build(builder & b, ggml_tensor * x) const;

private:
    const state_spec & spec() const { return of.hparams().layers[layer].state; }
    const role_tensors & weights() const { return of.layers()[layer]; }
    bool gates_here() const;
    ggml_tensor * product(builder & b, ggml_tensor * x, role weight) const;
    ggml_tensor * short_conv(builder & b, ggml_tensor * x) const;
    ggml_tensor * delta_net(builder & b, ggml_tensor * x) const;
    ggml_tensor * mamba2(builder & b, ggml_tensor * x) const;
    struct source;
    source source_of(builder & b, ggml_tensor * x) const;
    ggml_tensor * taps_of(builder & b) const;
    struct step;
    step step_of(builder & b, ggml_tensor * x) const;
};

} // namespace kvg
