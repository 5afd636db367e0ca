#include "graph/attend.h"

#include <algorithm>
#include <cmath>

#include "device.h"
#include "error.h"
#include "team.h"

namespace kvg {

namespace {

constexpr uint32_t MAX_SPLIT = 128; // heads of K by tokens: more are work enough for all threads without sharing out ranges

constexpr uint64_t READ_AT_ONCE = 1 << 13; // numbers of K that one thread reads in 8 us from memory: worth sharing out

constexpr uint32_t FEW_TOKENS = 2; // of a unit where each token sees other cells, so that there are more units
constexpr uint32_t UNITS_OF_A_THREAD =
    4; // more of them are shared out evenly as they are: a range's first chunk isn't prefetched

uint32_t count_blocks(uint32_t n_tokens, uint32_t block = ATTEND_TOKENS) { return (n_tokens + block - 1) / block; }

bool is_split(uint32_t n_tokens, uint32_t n_head_kv) { return n_tokens == 1 || n_tokens * n_head_kv <= MAX_SPLIT; }

// Of the partial results of one token for a KV head.
size_t unit_floats(uint32_t head_dim_v, uint32_t group) { return size_t{group} * attend_partial_floats(head_dim_v); }

attend_rows rows_of(const ggml_tensor * t, uint32_t begin) {
    return {static_cast<const uint8_t *>(t->data) + begin * t->nb[2], t->nb[2], t->nb[1], t->type};
}

// The same for rows as the cache has them, not by heads; begin: before the first of them when below 0.
attend_rows whole_rows_of(const ggml_tensor * t, int64_t begin, uint32_t head_dim) {
    const auto stride = static_cast<int64_t>(t->nb[1]);
    return {static_cast<const uint8_t *>(t->data) + begin * stride, t->nb[1], ggml_row_size(t->type, head_dim), t->type};
}

} // namespace

attend_workspace::attend_workspace(const std::vector<layer_spec> & layers, uint32_t n_cells, int max_threads) {
    size_t partial_floats = 0;
    size_t most_units = 0;
    uint32_t head_dim = 0;
    for (const layer_spec & layer : layers) {
        if (!layer.attends()) {
            continue;
        }
        const uint32_t group = layer.n_head / layer.n_head_kv;
        const size_t unit = unit_floats(layer.head_dim_v, group);
        const size_t scratch = attend_scratch_floats(layer.head_dim_k, layer.head_dim_v, group);
        uint32_t most = 1; // tokens whose ranges are shared out
        while (is_split(most + 1, layer.n_head_kv)) {
            ++most;
        }
        const size_t n_units = size_t{count_blocks(most)} * layer.n_head_kv;
        const size_t n_split =
            n_units * std::min(most, ATTEND_TOKENS) * seen_ranges::count(n_cells, seen_ranges::shortest(layer.n_head_kv));
        scratch_floats_ = std::max(scratch_floats_, ATTEND_TOKENS * unit + scratch);
        partial_floats = std::max(partial_floats, n_split * unit);
        most_units = std::max(most_units, size_t{count_blocks(most, FEW_TOKENS)} * layer.n_head_kv);
        head_dim = std::max(head_dim, layer.head_dim_k);
    }
    done_ = std::vector<std::atomic<uint32_t>>(most_units);
    const size_t threads_floats = scratch_floats_ * static_cast<size_t>(max_threads);
    const size_t n_bytes = (threads_floats + partial_floats) * sizeof(float);
    const bool fits = has_room(cpu_device(), n_bytes);
    buffer_.reset(fits ? ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), n_bytes) : nullptr);
    if (!buffer_) {
        fail(KVG_DEVICE, "attention over heads of %u on %d threads needs %s and %s are free; use fewer threads", head_dim,
             max_threads, format_bytes(n_bytes).c_str(), format_bytes(device_memory(cpu_device()).free).c_str());
    }
    scratch_ = static_cast<float *>(ggml_backend_buffer_get_base(buffer_.get()));
    partial_ = scratch_ + threads_floats;
}

// As ggml has them: a geometric sequence, and where the number of heads is no power of two, one of twice as many heads behind it.
std::vector<float> attend_op::slopes_of(const layer_spec & layer) {
    if (layer.max_bias == 0.0f) {
        return {};
    }
    uint32_t power = 1;
    while (2 * power <= layer.n_head) {
        power *= 2;
    }
    const float first = std::pow(2.0f, -layer.max_bias / static_cast<float>(power));
    const float behind = std::pow(2.0f, -layer.max_bias / 2.0f / static_cast<float>(power));
    std::vector<float> slopes;
    for (uint32_t h = 0; h < layer.n_head; ++h) {
        slopes.push_back(h < power ? std::pow(first, static_cast<float>(h + 1))
                                   : std::pow(behind, static_cast<float>(2 * (h - power) + 1)));
    }
    return slopes;
}

ggml_tensor * attend_op::node(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask,
                              ggml_tensor * sinks) {
    ggml_tensor * args[] = {q, k, v, mask, sinks};
    const int n_args = sinks ? 5 : 4;
    return ggml_custom_4d(ctx, GGML_TYPE_F32, v->ne[0], q->ne[1], q->ne[2], 1, args, n_args, compute, GGML_N_TASKS_MAX, this);
}

void attend_op::observe(uint32_t from, uint32_t n_tokens, observed_attention * to, size_t place) {
    observed_ = from < n_tokens ? to : nullptr;
    observed_place_ = place;
    observed_from_ = from;
    if (observed_) {
        const size_t n_blocks = count_blocks(n_tokens) - from / ATTEND_TOKENS;
        workspace_.shares_.resize(std::max(workspace_.shares_.size(), n_blocks * n_head_kv_ * attended_.span.n));
    }
}

float * attend_op::shares_of(const attend_job & job, uint32_t token, uint32_t head_kv) {
    const uint32_t block = token / ATTEND_TOKENS - observed_from_ / ATTEND_TOKENS;
    return workspace_.shares_.data() + (size_t{block} * job.n_head_kv + head_kv) * job.n_kv;
}

// Once more over all cells, now that the sums of a unit's weights are known.
void attend_op::observe(const attend_job & job, const attend_unit & unit, float * merged, float * scratch) {
    if (!observed_ || unit.token_end <= observed_from_) {
        return;
    }
    attend_job again = job;
    again.range_begins = nullptr;
    again.shares = shares_of(job, unit.token_begin, unit.head_kv);
    again.peaks = observed_->peaks;
    std::fill_n(again.shares, job.n_kv, 0.0f);
    const uint32_t begin = std::max(unit.token_begin, observed_from_);
    float * sums = merged + (begin - unit.token_begin) * unit_floats(job.head_dim_v, job.n_head / job.n_head_kv);
    kernel_.run(again, {begin, unit.token_end, unit.head_kv, 0, 1}, sums, scratch);
}

// In an order that doesn't depend on threads.
void attend_op::add_observed(const attend_job & job) {
    const size_t n = std::min<size_t>(job.n_kv, observed_->n_rows - attended_.span.begin);
    for (uint32_t token = observed_from_; token < job.n_tokens; token += ATTEND_TOKENS - token % ATTEND_TOKENS) {
        for (uint32_t head_kv = 0; head_kv < job.n_head_kv; ++head_kv) {
            const float * found = shares_of(job, token, head_kv);
            const size_t head = observed_place_ * job.n_head_kv + head_kv;
            float * to = observed_->of_head.data() + head * observed_->n_rows + attended_.span.begin;
            for (size_t i = 0; i < job.n_kv; ++i) {
                if (const size_t c = job.order ? job.order[i] : i; c < n) {
                    to[c] = observed_->peaks ? std::max(to[c], found[i]) : to[c] + found[i];
                }
            }
        }
    }
    observed_->n_queries[observed_place_] += static_cast<double>(job.n_head) * (job.n_tokens - observed_from_);
}

// A unit's range among others, which are shared out. The thread that does the last one of them adds all up: nobody waits in here.
// i: the unit's place among n_units
void attend_op::attend_range(const attend_job & job, const attend_unit & unit, uint32_t i, uint32_t n_units, float * scratch) {
    attend_workspace & w = workspace_;
    const size_t floats = std::min(job.n_tokens, block()) * unit_floats(job.head_dim_v, job.n_head / job.n_head_kv);
    const auto partial = [&](uint32_t range) { return w.partial_ + (size_t{range} * n_units + i) * floats; };
    kernel_.run(job, unit, partial(unit.range), scratch);
    if (++w.done_[i] < attended_.ranges.n()) {
        return;
    }
    for (uint32_t r = 1; r < attended_.ranges.n(); ++r) {
        kernel_.add(job, unit, partial(0), partial(r));
    }
    finish(job, unit, partial(0), scratch);
}

void attend_op::finish(const attend_job & job, const attend_unit & unit, float * partial, float * scratch) {
    kernel_.finish(job, unit, partial);
    observe(job, unit, partial, scratch);
}

// Tokens of a unit. What cells get of those that are observed is added up by the large ones.
uint32_t attend_op::block() const { return observed_ || attended_.ranges.is_shared() ? ATTEND_TOKENS : FEW_TOKENS; }

// A unit, or a range of it, is claimed by whoever is free.
void attend_op::share(const attend_job & job, size_t ith, size_t n_threads) {
    attend_workspace & w = workspace_;
    float * scratch = w.scratch_ + w.scratch_floats_ * ith;
    float * sum = scratch + attend_scratch_floats(job.head_dim_k, job.head_dim_v, job.n_head / job.n_head_kv);
    const uint32_t n_units = count_blocks(job.n_tokens, block()) * job.n_head_kv;
    const bool split =
        attended_.ranges.n() > 1 && n_units < UNITS_OF_A_THREAD * n_threads && is_split(job.n_tokens, job.n_head_kv);
    const uint32_t n_claims = n_units * (split ? attended_.ranges.n() : 1);
    for (uint32_t claim = w.claimed_++; claim < n_claims; claim = w.claimed_++) {
        const uint32_t i = claim % n_units;
        const uint32_t range = claim / n_units;
        const uint32_t begin = i / job.n_head_kv * block();
        const attend_unit unit = {begin, std::min(begin + block(), job.n_tokens), i % job.n_head_kv, range,
                                  split ? range + 1 : attended_.ranges.n()};
        if (split) {
            attend_range(job, unit, i, n_units, scratch);
        } else {
            kernel_.run(job, unit, sum, scratch);
            finish(job, unit, sum, scratch);
        }
    }
}

attend_job attend_op::job_of(const ggml_tensor * dst) const {
    const ggml_tensor * q = dst->src[0];
    const ggml_tensor * k = dst->src[1];
    const ggml_tensor * sinks = dst->src[4];
    attend_job job = {};
    job.q = static_cast<const float *>(q->data);
    job.k = rows_of(k, attended_.span.begin);
    job.v = rows_of(dst->src[2], attended_.span.begin);
    job.mask = static_cast<const uint16_t *>(dst->src[3]->data);
    job.sinks = sinks ? static_cast<const float *>(sinks->data) : nullptr;
    job.out = static_cast<float *>(dst->data);
    job.scale = scale_;
    job.soft_cap = soft_cap_;
    job.slopes = slopes_.empty() ? nullptr : slopes_.data();
    job.cell_positions = attended_.cell_positions.data();
    job.token_positions = attended_.token_positions.data();
    job.head_dim_k = static_cast<uint32_t>(q->ne[0]);
    job.head_dim_v = static_cast<uint32_t>(dst->ne[0]);
    job.n_head = static_cast<uint32_t>(q->ne[1]);
    job.n_head_kv = static_cast<uint32_t>(k->ne[1]);
    job.n_tokens = static_cast<uint32_t>(q->ne[2]);
    job.n_kv = attended_.span.n;
    if (old_.k) {
        const int64_t begin = int64_t{attended_.span.begin} - old_.n_fresh;
        job.old_k = whole_rows_of(old_.k, begin, job.head_dim_k);
        job.old_v = whole_rows_of(old_.v, begin, job.head_dim_v);
        job.n_fresh = old_.n_fresh > attended_.span.begin ? old_.n_fresh - attended_.span.begin : 0;
    }
    job.order = attended_.order.empty() ? nullptr : attended_.order.data();
    job.range_begins = attended_.ranges.begins();
    job.waiting = waiting_;
    job.waiting.of_cell += job.waiting.of_cell ? attended_.span.begin : 0;
    return job;
}

void attend_op::compute(ggml_tensor * dst, int ith, int nth, void * op) {
    auto & self = *static_cast<attend_op *>(op);
    const attend_job job = self.job_of(dst);
    attend_workspace & w = self.workspace_;
    if (nth > 1) {
        self.share(job, static_cast<size_t>(ith), static_cast<size_t>(nth));
    } else {
        const uint64_t n_read = uint64_t{job.n_kv} * job.n_head_kv * job.head_dim_k * job.n_tokens;
        const int n_threads = n_read < READ_AT_ONCE ? 1 : team_share::n_threads();
        team::here().run(n_threads, [&](int i) { self.share(job, static_cast<size_t>(i), static_cast<size_t>(n_threads)); });
    }
    // the last to leave makes all ready for the next layer, which ggml's barrier holds back until then
    if (++w.left_ == static_cast<uint32_t>(nth)) {
        if (self.observed_) {
            self.add_observed(job);
        }
        w.claimed_ = 0;
        w.left_ = 0;
        std::fill(w.done_.begin(), w.done_.end(), 0);
    }
}

} // namespace kvg
