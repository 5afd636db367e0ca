#include "graph/recur.h"

#include <algorithm>
#include <cmath>

#include "graph/thread_share.h"

namespace kvg {

namespace {

const float * floats(const ggml_tensor * t) { return t ? static_cast<const float *>(t->data) : nullptr; }

// by_token: the number of the dimension of tokens
recur_input input_of(const ggml_tensor * t, int by_token) { return {floats(t), t->nb[by_token] / sizeof(float)}; }

// Of n parts of an operation: as many as take some microseconds.
uint32_t least(uint32_t n, const ggml_tensor * dst) {
    constexpr uint64_t NUMBERS = 256; // of the result; each takes a row of a state, or some taps
    return static_cast<uint32_t>(std::max<uint64_t>(1, NUMBERS * n / static_cast<uint64_t>(ggml_nelements(dst))));
}

} // namespace

recur_op::recur_op(const state_spec & spec, uint64_t offset, const std::vector<recur_run> & runs)
    : spec_(spec), offset_(offset), runs_(runs) {}

ggml_tensor * recur_op::convolve(builder & b, ggml_tensor * x, ggml_tensor * taps, ggml_tensor * bias) {
    ggml_tensor * args[] = {x, taps, bias};
    return ggml_custom_4d(b.ctx(), GGML_TYPE_F32, x->ne[0], x->ne[1], 1, 1, args, bias ? 3 : 2, run_convolve, GGML_N_TASKS_MAX,
                          this);
}

void recur_op::run_convolve(ggml_tensor * dst, int ith, int nth, void * op) {
    const auto & self = *static_cast<const recur_op *>(op);
    const cpu_kernels & kernels = kernels_for_width(self.spec_.n_channels);
    convolve_job job = {};
    job.runs = self.runs_from(self.offset_);
    job.x = input_of(dst->src[0], 1);
    job.taps = floats(dst->src[1]);
    job.bias = floats(dst->src[2]);
    job.out = static_cast<float *>(dst->data);
    job.n_taps = self.spec_.n_taps;
    job.n_channels = self.spec_.n_channels;
    job.silu = self.spec_.kind != state_kind::short_conv;
    share_out(job.n_channels, kernels.lanes, least(job.n_channels, dst), ith, nth,
              [&](uint32_t begin, uint32_t end) { kernels.recur.convolve(job, begin, end); });
}

ggml_tensor * recur_op::recall(builder & b, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * decay,
                               ggml_tensor * beta) {
    ggml_tensor * args[] = {q, k, v, decay, beta};
    return ggml_custom_4d(b.ctx(), GGML_TYPE_F32, v->ne[0], v->ne[1], v->ne[2], 1, args, 5, run_recall, GGML_N_TASKS_MAX, this);
}

void recur_op::run_recall(ggml_tensor * dst, int ith, int nth, void * op) {
    const auto & self = *static_cast<const recur_op *>(op);
    const state_spec & spec = self.spec_;
    const recur_kernel & kernel = kernels_for_width(spec.head_dim_k).recur;
    recall_job job = {};
    job.runs = self.runs_from(self.offset_ + spec.conv_floats());
    job.q = input_of(dst->src[0], 2);
    job.k = input_of(dst->src[1], 2);
    job.v = input_of(dst->src[2], 2);
    job.decay = input_of(dst->src[3], spec.decays_by_width ? 2 : 1);
    job.beta = input_of(dst->src[4], 1);
    job.out = static_cast<float *>(dst->data);
    job.delta = spec.kind == state_kind::delta_net;
    job.scale = job.delta ? 1.0f / std::sqrt(static_cast<float>(spec.head_dim_k)) : 1.0f;
    job.head_dim_k = spec.head_dim_k;
    job.head_dim_v = spec.head_dim_v;
    job.n_head = spec.n_head;
    job.n_head_k = spec.n_head_k;
    job.in_turn = spec.in_turn;
    job.decay_by_width = spec.decays_by_width;
    const uint32_t n = static_cast<uint32_t>(uint64_t{spec.v_width()} / RECUR_ROWS);
    share_out(n, 1, least(n, dst), ith, nth, [&](uint32_t begin, uint32_t end) { kernel.recall(job, begin, end); });
}

} // namespace kvg
