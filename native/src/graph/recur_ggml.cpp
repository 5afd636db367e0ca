#include "graph/recur_ggml.h"

#include <cmath>
#include <limits>

#include "device.h"
#include "host_memory.h"

namespace kvg {

namespace {

// Tokens of a group: of x (ne0, ne1, n_tokens in all), from one on, (ne0, ne1, n_tokens, n_seqs).
ggml_tensor * tokens_of(builder & b, ggml_tensor * x, const state_group & group, size_t first) {
    const size_t token = x->nb[2];
    return ggml_view_4d(b.ctx(), x, x->ne[0], x->ne[1], group.n_tokens, group.n_seqs, x->nb[1], token, group.n_tokens * token,
                        first * token);
}

// Vulkan ends the process where one of the sources of a recurrence doesn't begin where its shaders can read from.
bool is_aligned(const ggml_tensor * view) {
    constexpr size_t ALIGN = 256; // the largest that Vulkan allows a driver to ask for
    return view->view_offs % ALIGN == 0;
}

ggml_tensor * aligned(builder & b, ggml_tensor * view) { return is_aligned(view) ? view : ggml_cont(b.ctx(), view); }

// A number for each head and token, (n_head, n_tokens), as heads of one.
ggml_tensor * as_heads(builder & b, ggml_tensor * x) { return ggml_reshape_3d(b.ctx(), x, 1, x->ne[0], x->ne[1]); }

} // namespace

// The results of all groups, in their order: result_of(group, which it is, its first token) is (ne0, its tokens).
template <class F> ggml_tensor * recur_ggml::by_group(builder & b, F result_of) {
    ggml_tensor * all = nullptr;
    size_t first = 0;
    for (size_t g = 0; g < groups_.size(); ++g) {
        ggml_tensor * made = result_of(groups_[g], g, first);
        all = all ? ggml_concat(b.ctx(), all, made, 1) : made;
        b.root(all); // now, so that the group's states are not kept in memory
        first += size_t{groups_[g].n_seqs} * groups_[g].n_tokens;
    }
    return all;
}

ggml_tensor * recur_ggml::convolve(builder & b, ggml_tensor * x, ggml_tensor * taps, ggml_tensor * bias) {
    const int64_t n_past = int64_t{spec_.n_taps} - 1;
    const int64_t n = spec_.n_channels;
    return by_group(b, [&](const state_group & group, size_t g, size_t first) {
        ggml_tensor * past = ggml_get_rows(b.ctx(), rows_.inputs, in_[g].from);
        past = ggml_reshape_3d(b.ctx(), past, n, n_past, group.n_seqs);
        ggml_tensor * fresh =
            ggml_view_3d(b.ctx(), x, n, group.n_tokens, group.n_seqs, x->nb[1], group.n_tokens * x->nb[1], first * x->nb[1]);
        ggml_tensor * all = ggml_concat(b.ctx(), past, fresh, 1); // oldest first, as in a state
        ggml_tensor * last = ggml_view_2d(b.ctx(), all, n * n_past, group.n_seqs, all->nb[2], group.n_tokens * all->nb[1]);
        rows_.inputs = ggml_set_rows(b.ctx(), rows_.inputs, last, in_[g].to);
        b.root(rows_.inputs);
        ggml_tensor * out = ggml_ssm_conv(b.ctx(), ggml_cont(b.ctx(), ggml_permute(b.ctx(), all, 1, 0, 2, 3)), taps);
        out = bias ? ggml_add(b.ctx(), out, bias) : out;
        out = spec_.kind == state_kind::short_conv ? out : ggml_silu(b.ctx(), out);
        return ggml_reshape_2d(b.ctx(), out, n, int64_t{group.n_tokens} * group.n_seqs);
    });
}

ggml_tensor * recur_ggml::to_unit(builder & b, ggml_tensor * x) {
    const auto n = static_cast<float>(spec_.head_dim_k);
    ggml_tensor * heads = ggml_view_3d(b.ctx(), x, spec_.head_dim_k, x->ne[0] / spec_.head_dim_k, x->ne[1],
                                       spec_.head_dim_k * sizeof(float), x->nb[1], 0);
    ggml_tensor * out = ggml_scale(b.ctx(), ggml_rms_norm(b.ctx(), heads, eps_ / n), 1.0f / std::sqrt(n));
    return ggml_reshape_2d(b.ctx(), out, x->ne[0], x->ne[1]);
}

// Heads of Q or K of a group, so that head h of V has that of h % their number.
ggml_tensor * recur_ggml::for_heads(builder & b, ggml_tensor * heads) const {
    const int64_t n = spec_.n_head / spec_.n_head_k;
    if (spec_.in_turn || n == 1) {
        return heads;
    }
    const int64_t n_tokens = heads->ne[2];
    const int64_t n_seqs = heads->ne[3];
    heads = ggml_cont_4d(b.ctx(), heads, heads->ne[0], 1, heads->ne[1], n_tokens * n_seqs);
    heads = ggml_repeat_4d(b.ctx(), heads, heads->ne[0], n, heads->ne[2], heads->ne[3]);
    return ggml_reshape_4d(b.ctx(), heads, heads->ne[0], spec_.n_head, n_tokens, n_seqs);
}

// What an operation has made of a group: results of all its tokens, then its states, which are written. Returns (v_width, n_tokens).
ggml_tensor * recur_ggml::split(builder & b, ggml_tensor * made, size_t group) {
    const size_t width = spec_.v_width() * sizeof(float);
    const size_t n_tokens = size_t{groups_[group].n_seqs} * groups_[group].n_tokens;
    ggml_tensor * states =
        ggml_view_2d(b.ctx(), made, rows_.matrices->ne[0], groups_[group].n_seqs, rows_.matrices->nb[1], n_tokens * width);
    rows_.matrices = ggml_set_rows(b.ctx(), rows_.matrices, states, in_[group].to);
    b.root(rows_.matrices);
    return ggml_view_2d(b.ctx(), made, spec_.v_width(), static_cast<int64_t>(n_tokens), width, 0);
}

ggml_tensor * recur_ggml::delta(builder & b, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * decay,
                                ggml_tensor * beta) {
    decay = spec_.decays_by_width ? decay : as_heads(b, decay);
    beta = as_heads(b, beta);
    ggml_tensor * out = by_group(b, [&](const state_group & group, size_t g, size_t first) {
        const auto part = [&](ggml_tensor * x) { return aligned(b, tokens_of(b, x, group, first)); };
        ggml_tensor * of_q = tokens_of(b, q, group, first);
        ggml_tensor * of_k = tokens_of(b, k, group, first);
        if (!is_aligned(of_q) || !is_aligned(of_k)) { // both: CUDA wants tokens of both equally far apart
            of_q = ggml_cont(b.ctx(), of_q);
            of_k = ggml_cont(b.ctx(), of_k);
        }
        ggml_tensor * states = ggml_get_rows(b.ctx(), rows_.matrices, in_[g].from);
        states = ggml_reshape_4d(b.ctx(), states, spec_.head_dim_k, spec_.head_dim_v, spec_.n_head, group.n_seqs);
        return split(
            b,
            ggml_gated_delta_net(b.ctx(), for_heads(b, of_q), for_heads(b, of_k), part(v), part(decay), part(beta), states, 1),
            g);
    });
    return ggml_reshape_3d(b.ctx(), out, spec_.head_dim_v, spec_.n_head, out->ne[1]);
}

ggml_tensor * recur_ggml::scan(builder & b, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * dt,
                               ggml_tensor * a, ggml_tensor * skip) {
    ggml_tensor * steps = as_heads(b, dt);
    ggml_tensor * out = by_group(b, [&](const state_group & group, size_t g, size_t first) {
        const auto part = [&](ggml_tensor * x) { return aligned(b, tokens_of(b, x, group, first)); };
        ggml_tensor * of_dt = part(steps);
        of_dt = ggml_reshape_3d(b.ctx(), of_dt, spec_.n_head, group.n_tokens, group.n_seqs);
        ggml_tensor * states =
            ggml_reshape_4d(b.ctx(), rows_.matrices, spec_.head_dim_k, spec_.head_dim_v, spec_.n_head, rows_.matrices->ne[1]);
        return split(b, ggml_ssm_scan(b.ctx(), states, part(v), of_dt, a, part(k), part(q), in_[g].from, 1), g);
    });
    out = ggml_reshape_3d(b.ctx(), out, spec_.head_dim_v, spec_.n_head, out->ne[1]);
    return skip ? ggml_add(b.ctx(), out, ggml_mul(b.ctx(), v, ggml_reshape_2d(b.ctx(), skip, 1, spec_.n_head))) : out;
}

namespace {

// What a layer's recurrence is made of, for two sequences with a token each, without memory.
class dummy_graph {
public:
    dummy_graph(const state_spec & spec, uint32_t n_rows)
        : ctx_(new_ggml_context(16 * ggml_tensor_overhead())), spec_(spec),
          in_({state_inputs{of(GGML_TYPE_I32, N_SEQS), of(GGML_TYPE_I64, N_SEQS)}}),
          recur_(spec, 1e-6f, new_state_tensors(ctx_.get(), spec, n_rows), groups_, in_), builder_(no_adapters_) {
        ggml_tensor * taps = of(GGML_TYPE_F32, spec.n_taps, spec.n_channels);
        ggml_tensor * bias = spec.kind == state_kind::mamba2 ? of(GGML_TYPE_F32, spec.n_channels) : nullptr;
        ggml_tensor * x = recur_.convolve(builder_, of(GGML_TYPE_F32, spec.n_channels, N_SEQS), taps, bias);
        if (spec.kind != state_kind::short_conv) {
            builder_.root(recalled(x));
        }
    }
    ggml_cgraph * finish() { return builder_.finish(); }

private:
    static constexpr uint32_t N_SEQS = 2;

    ggml_tensor * of(ggml_type type, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1) {
        return ggml_new_tensor_3d(ctx_.get(), type, ne0, ne1, ne2);
    }
    ggml_tensor * heads(ggml_tensor * x, int64_t dim, int64_t n) {
        return ggml_view_3d(builder_.ctx(), x, dim, n, N_SEQS, static_cast<size_t>(dim) * sizeof(float), x->nb[1], 0);
    }
    ggml_tensor * recalled(ggml_tensor * x) {
        ggml_tensor * v = heads(x, spec_.head_dim_v, spec_.n_head);
        ggml_tensor * steps = of(GGML_TYPE_F32, spec_.n_head, N_SEQS);
        if (spec_.kind == state_kind::mamba2) {
            ggml_tensor * k = heads(x, spec_.head_dim_k, spec_.n_head_k);
            return recur_.scan(builder_, k, k, v, steps, of(GGML_TYPE_F32, 1, spec_.n_head), of(GGML_TYPE_F32, spec_.n_head));
        }
        ggml_tensor * unit =
            recur_.to_unit(builder_, ggml_view_2d(builder_.ctx(), x, 2 * int64_t{spec_.k_width()}, N_SEQS, x->nb[1], 0));
        ggml_tensor * k = heads(unit, spec_.head_dim_k, spec_.n_head_k);
        ggml_tensor * decay = spec_.decays_by_width ? of(GGML_TYPE_F32, spec_.head_dim_k, spec_.n_head, N_SEQS) : steps;
        return recur_.delta(builder_, k, k, v, decay, steps);
    }

    ggml_context_ptr ctx_;
    const state_spec & spec_;
    const std::vector<active_adapter> no_adapters_;
    const std::vector<state_group> groups_ = {{N_SEQS, 1}};
    const std::vector<state_inputs> in_;
    recur_ggml recur_;
    builder builder_;
};

// The sizes that CUDA's kernels have. It says yes to others, and ends the process.
bool has_known_sizes(const state_spec & spec, uint32_t n_rows) {
    const uint32_t dim = spec.head_dim_v;
    const bool has_taps = spec.n_taps >= 3 && spec.n_taps <= 5;
    switch (spec.kind) {
    case state_kind::none:
        return false;
    case state_kind::short_conv:
        return has_taps;
    case state_kind::delta_net:
        return has_taps && spec.head_dim_k == dim && (dim == 16 || dim == 32 || dim == 64 || dim == 128);
    case state_kind::mamba2: // its kernel counts the bytes of all rows in an int
        return has_taps && !spec.in_turn &&
               uint64_t{spec.v_width()} * spec.head_dim_k * sizeof(float) * (uint64_t{n_rows} + 1) <=
                   static_cast<uint64_t>(std::numeric_limits<int32_t>::max());
    }
    return false;
}

} // namespace

bool can_recur_on(ggml_backend_dev_t device, const state_spec & spec, uint32_t n_rows) {
    if (is_cpu(device) || is_rpc(device) || !has_known_sizes(spec, n_rows)) {
        return false; // a remote device can't be asked
    }
    dummy_graph graph(spec, n_rows);
    return can_run_all(device, graph.finish());
}

} // namespace kvg
