#include "graph/gate.h"

#include "cpu/kernel.h"

namespace kvg {

gate_function gate_of(ggml_glu_op kind) {
    const feed_forward_kernel & gates = kernels_here()[0]->feed_forward;
    switch (kind) {
    case GGML_GLU_OP_SWIGLU:
        return gates.swiglu;
    case GGML_GLU_OP_GEGLU:
        return gates.geglu;
    case GGML_GLU_OP_SWIGLU_OAI:
        return gates.swiglu_oai;
    default:
        return nullptr;
    }
}

} // namespace kvg
