// The layers of a small hybrid model: one attends, and one has a state.
#pragma once

#include <cstdint>

#include "model/hparams.h"

namespace kvg {

constexpr uint32_t HYBRID_STATE_FLOATS = 2 * 8; // two inputs of eight channels

// A layer that attends, and one with a short convolution.
inline hparams hybrid_layers() {
    hparams h = {};
    layer_spec attending = {};
    attending.n_head = attending.n_head_kv = 1;
    attending.head_dim_k = attending.head_dim_v = 32;
    layer_spec recurrent = {};
    recurrent.kv_from = 1;
    recurrent.state.kind = state_kind::short_conv;
    recurrent.state.n_taps = 3;
    recurrent.state.n_channels = 8;
    h.layers = {attending, recurrent};
    h.groups = make_groups(h.layers);
    return h;
}

} // namespace kvg
