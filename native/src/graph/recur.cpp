#include "graph/recur.h"

#include <algorithm>
#include <cmath>

#include "device.h"
#include "error.h"
#include "graph/own_node.h"
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

// How states are cut for so many threads. Heads of V with the same K go together, whose products are computed once for all of them; where
// threads would have nothing to do, fewer of them, and not all of their rows. It makes no difference to what is computed.
class recall_pieces {
public:
    recall_pieces(const recall_job & job, int n_threads)
        : n_head_k_(job.n_head_k), group_(job.n_head / job.n_head_k), n_rows_(job.head_dim_v), heads_(std::min(group_, HEADS)),
          rows_(n_rows_) {
        while (n_threads > 1 && n() < 2 * static_cast<uint32_t>(n_threads) && (heads_ > 1 || rows_ > ROWS)) {
            heads_ > 1 ? heads_ = (heads_ + 1) / 2 : rows_ = (rows_ / 2 + ROWS - 1) / ROWS * ROWS;
        }
    }
    uint32_t n() const { return n_head_k_ * n_groups() * n_parts(); }
    recall_piece at(uint32_t i) const {
        const uint32_t row = i % n_parts() * rows_;
        const uint32_t head = i / n_parts() % n_groups() * heads_;
        return {i / n_parts() / n_groups(), head, std::min(heads_, group_ - head), row, std::min(row + rows_, n_rows_)};
    }

private:
    uint32_t n_groups() const { return (group_ + heads_ - 1) / heads_; }
    uint32_t n_parts() const { return (n_rows_ + rows_ - 1) / rows_; }

    static constexpr uint32_t HEADS = 4; // their states stay in L2
    static constexpr uint32_t ROWS = 32; // whole vectors on any CPU
    uint32_t n_head_k_;
    uint32_t group_;
    uint32_t n_rows_;
    uint32_t heads_;
    uint32_t rows_;
};

} // namespace

recur_workspace::recur_workspace(const std::vector<layer_spec> & layers, int max_threads) {
    for (const layer_spec & layer : layers) {
        if (layer.recurs() && layer.state.n_head > 0) {
            thread_floats_ = std::max(thread_floats_, recall_scratch_floats(layer.state.head_dim_k));
        }
    }
    const size_t n_bytes = thread_floats_ * static_cast<size_t>(max_threads) * sizeof(float);
    if (n_bytes == 0) {
        return;
    }
    buffer_.reset(has_room(cpu_device(), n_bytes) ? ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), n_bytes)
                                                  : nullptr);
    if (!buffer_) {
        fail(KVG_DEVICE, "recurrent layers on %d threads need %s and %s are free; use fewer threads", max_threads,
             format_bytes(n_bytes).c_str(), format_bytes(device_memory(cpu_device()).free).c_str());
    }
}

recur_op::recur_op(const state_spec & spec, float eps, uint64_t offset, const std::vector<recur_run> & runs,
                   const recur_workspace & workspace)
    : spec_(spec), eps_(eps), offset_(offset), runs_(runs), workspace_(workspace) {}

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

// args: Q, K, V, decays, betas, and what skips the state, or not
ggml_tensor * recur_op::recall(builder & b, const std::vector<ggml_tensor *> & args, ggml_custom_op_t run) {
    const ggml_tensor * v = args[2];
    return ggml_custom_4d(b.ctx(), GGML_TYPE_F32, v->ne[0], v->ne[1], v->ne[2], 1, const_cast<ggml_tensor **>(args.data()),
                          static_cast<int>(args.size()), run, GGML_N_TASKS_MAX, this);
}

ggml_tensor * recur_op::delta(builder & b, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * decay,
                              ggml_tensor * beta) {
    return recall(b, {q, k, v, decay, beta}, run_delta);
}

ggml_tensor * recur_op::scan(builder & b, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * dt, ggml_tensor * a,
                             ggml_tensor * skip) {
    dt = ggml_softplus(b.ctx(), dt);
    ggml_tensor * decay = ggml_mul(b.ctx(), dt, ggml_reshape_1d(b.ctx(), a, spec_.n_head));
    std::vector<ggml_tensor *> args = {q, k, v, decay, dt};
    if (skip) {
        args.push_back(skip);
    }
    return recall(b, args, run_scan);
}

const char * recur_op::name_of(const ggml_tensor * node) {
    const ggml_custom_op_t run = function_of(node);
    return run == run_convolve                          ? ggml_op_name(GGML_OP_SSM_CONV)
           : run == run_delta                           ? ggml_op_name(GGML_OP_GATED_DELTA_NET)
           : run == run_scan                            ? ggml_op_name(GGML_OP_SSM_SCAN)
           : run == run_to_unit || run == run_pass_gate ? ""
                                                        : nullptr;
}

void recur_op::run_delta(ggml_tensor * dst, int ith, int nth, void * op) {
    static_cast<const recur_op *>(op)->compute(dst, ith, nth);
}

void recur_op::run_scan(ggml_tensor * dst, int ith, int nth, void * op) {
    static_cast<const recur_op *>(op)->compute(dst, ith, nth);
}

// The part of one thread.
void recur_op::compute(ggml_tensor * dst, int ith, int nth) const {
    const recur_kernel & kernel = kernels_for_width(spec_.head_dim_k | spec_.head_dim_v).recur; // lanes are a power of 2
    recall_job job = {};
    job.runs = runs_from(offset_ + spec_.conv_floats());
    job.q = input_of(dst->src[0], 2);
    job.k = input_of(dst->src[1], 2);
    job.v = input_of(dst->src[2], 2);
    job.decay = input_of(dst->src[3], spec_.decays_by_width ? 2 : 1);
    job.beta = input_of(dst->src[4], 1);
    job.skip = floats(dst->src[5]);
    job.out = static_cast<float *>(dst->data);
    job.delta = spec_.kind == state_kind::delta_net;
    job.scale = job.delta ? 1.0f / std::sqrt(static_cast<float>(spec_.head_dim_k)) : 1.0f;
    job.head_dim_k = spec_.head_dim_k;
    job.head_dim_v = spec_.head_dim_v;
    job.n_head = spec_.n_head;
    job.n_head_k = spec_.n_head_k;
    job.in_turn = spec_.in_turn;
    job.decay_by_width = spec_.decays_by_width;
    if (std::any_of(runs_.begin(), runs_.end(), recur_by_chunks)) {
        const recall_pieces pieces(job, nth > 1 ? nth : team_share::n_threads());
        return share_out_to(pieces.n(), 1, 1, ith, nth, [&](uint32_t begin, uint32_t end, uint32_t thread) {
            for (uint32_t i = begin; i < end; ++i) {
                kernel.recall_by_chunks(job, pieces.at(i), workspace_.of_thread(thread));
            }
        });
    }
    const uint32_t n = static_cast<uint32_t>(uint64_t{spec_.v_width()} / RECUR_ROWS);
    share_out(n, 1, least(n, dst), ith, nth, [&](uint32_t begin, uint32_t end) { kernel.recall(job, begin, end); });
}

ggml_tensor * recur_op::to_unit(builder & b, ggml_tensor * x) {
    return ggml_custom_4d(b.ctx(), GGML_TYPE_F32, x->ne[0], x->ne[1], 1, 1, &x, 1, run_to_unit, GGML_N_TASKS_MAX, this);
}

void recur_op::run_to_unit(ggml_tensor * dst, int ith, int nth, void * op) {
    const auto & self = *static_cast<const recur_op *>(op);
    const uint32_t width = self.spec_.head_dim_k;
    const recur_kernel & kernel = kernels_for_width(width).recur;
    const recur_input x = input_of(dst->src[0], 1);
    const auto n = static_cast<uint32_t>(dst->ne[0]);
    share_out(static_cast<uint32_t>(dst->ne[1]), 1, PASSED_AT_ONCE / n, ith, nth, [&](uint32_t begin, uint32_t end) {
        for (uint32_t token = begin; token < end; ++token) {
            for (uint32_t i = 0; i < n; i += width) {
                kernel.to_unit(x.of(token) + i, static_cast<float *>(dst->data) + size_t{token} * n + i, width, self.eps_);
            }
        }
    });
}

ggml_tensor * recur_op::pass_gate(builder & b, ggml_tensor * x, ggml_tensor * gate, ggml_tensor * weight) {
    ggml_tensor * args[] = {x, gate, weight};
    return ggml_custom_4d(b.ctx(), GGML_TYPE_F32, x->ne[0], x->ne[1], 1, 1, args, 3, run_pass_gate, GGML_N_TASKS_MAX, this);
}

void recur_op::run_pass_gate(ggml_tensor * dst, int ith, int nth, void * op) {
    const auto & self = *static_cast<const recur_op *>(op);
    const state_spec & spec = self.spec_;
    const recur_input x = input_of(dst->src[0], 1);
    const recur_input gate = input_of(dst->src[1], 1);
    const float * weight = floats(dst->src[2]);
    const bool by_head = spec.kind == state_kind::delta_net;
    const uint32_t n = spec.v_width();
    const uint32_t width = by_head ? spec.head_dim_v : n / spec.n_head_k;
    const recur_kernel & kernel = kernels_for_width(width).recur;
    share_out(static_cast<uint32_t>(dst->ne[1]), 1, PASSED_AT_ONCE / n, ith, nth, [&](uint32_t begin, uint32_t end) {
        for (uint32_t token = begin; token < end; ++token) {
            for (uint32_t i = 0; i < n; i += width) {
                kernel.pass_gate({x.of(token) + i, gate.of(token) + i, weight + (by_head ? 0 : i),
                                  static_cast<float *>(dst->data) + size_t{token} * n + i, width, self.eps_,
                                  !spec.decays_by_width, !by_head});
            }
        }
    });
}

} // namespace kvg
