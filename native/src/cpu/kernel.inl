// The kernel, compiled once per instruction set: LANES floats a vector, KVG_ISA the namespace. Nothing from the standard library may
// be called here: an inline function compiled for AVX-512 could be the one that the linker keeps for everybody.

#include "cpu/kernel.h"

namespace kvg {
namespace KVG_ISA {

namespace {

constexpr uint32_t CHUNK = ATTEND_CHUNK;
constexpr uint32_t CELLS = 4;                       // K rows per step
constexpr uint32_t HEADS = LANES >= 8 ? 4 : 2;      // query heads per step of K, as the registers allow
constexpr uint32_t V_VECTORS = LANES == 16 ? 4 : 2; // of a V row per pass
constexpr uint64_t ALL_HIDDEN = 0xfc00fc00fc00fc00; // four times -infinity
constexpr float LOWEST = -__builtin_inff();

#include "cpu/vectors.inl"

#include "cpu/rows.inl"

#include "cpu/attend_queries.inl"

// Lists the cells of a chunk that any token of a unit sees. Returns how many.
uint32_t list_wanted(const attend_job & job, const attend_unit & unit, uint32_t first, uint32_t n, uint32_t * wanted) {
    const uint16_t * mask = job.mask + size_t{unit.token_begin} * job.n_kv + first;
    uint16_t all[CHUNK];
    __builtin_memcpy(all, mask, n * sizeof(uint16_t));
    for (uint32_t t = unit.token_begin + 1; t < unit.token_end; ++t) {
        mask += job.n_kv;
        for (uint32_t c = 0; c < n; ++c) {
            all[c] &= mask[c];
        }
    }
    return list_seen(all, n, wanted);
}

// Rows that vectors can't read where they are, as floats: those of a chunk that are wanted.
void convert(const attend_rows & from, uint32_t head_kv, uint32_t first, uint32_t head_dim, const uint32_t * wanted,
             uint32_t n_wanted, float * to) {
    const uint32_t padded = attend_padded(head_dim);
    const size_t row_bytes = ggml_row_size(from.type, head_dim);
    for (uint32_t i = 0; i < n_wanted; ++i) {
        const uint8_t * row = from.data + (first + wanted[i]) * from.cell_stride + head_kv * from.head_stride;
        float * out = to + wanted[i] * padded;
        prefetch(row, from.cell_stride, static_cast<uint32_t>(row_bytes));
        row_to_floats(from.type, row, out, head_dim);
        __builtin_memset(out + head_dim, 0, (padded - head_dim) * sizeof(float));
    }
}

// The queries of a unit: scaled, padded with zeros, and rotated for the cells that they were used for last.
struct unit_queries {
    float * floats;              // (padded, group, tokens)
    uint32_t has[ATTEND_TOKENS]; // each token's rotation + 1; 0: the token has no queries yet
};

void scale_queries(const attend_job & job, uint32_t token, uint32_t head_kv, float * q) {
    const uint32_t group = job.n_head / job.n_head_kv;
    const uint32_t padded = attend_padded(job.head_dim_k);
    const float scale = job.soft_cap == 0.0f ? job.scale : job.scale / job.soft_cap;
    const float * from = job.q + (size_t{token} * job.n_head + head_kv * group) * job.head_dim_k;
    for (uint32_t h = 0; h < group; ++h) {
        for (uint32_t d = 0; d < padded; ++d) {
            q[h * padded + d] = d < job.head_dim_k ? from[h * job.head_dim_k + d] * scale : 0.0f;
        }
    }
}

// rotation: from 1
void rotate_queries(const attend_job & job, uint32_t rotation, float * q) {
    const uint32_t padded = attend_padded(job.head_dim_k);
    const uint32_t group = job.n_head / job.n_head_kv;
    const attend_rotations & waiting = job.waiting;
    if (waiting.mixed != 0) { // a second time, which undoes it: rope rotates pairs of the unmixed dimensions
        mix_heads(q, size_t{group} * padded, waiting.mixed);
    }
    rotate_heads(q, group, waiting.how, waiting.tables + size_t{rotation - 1} * 2 * waiting.how.n_pairs);
    if (waiting.mixed != 0) {
        mix_heads(q, size_t{group} * padded, waiting.mixed);
    }
}

// The queries of one token. rotation: as attend_rotations::of_cell gives it; 0 for cells that don't wait
const float * queries_for(const attend_job & job, const attend_unit & unit, uint32_t token, uint32_t rotation,
                          unit_queries & queries) {
    const uint32_t i = token - unit.token_begin;
    float * q = queries.floats + size_t{i} * (job.n_head / job.n_head_kv) * attend_padded(job.head_dim_k);
    if (queries.has[i] != rotation + 1) {
        scale_queries(job, token, unit.head_kv, q);
        if (rotation != 0) {
            rotate_queries(job, rotation, q);
        }
        queries.has[i] = rotation + 1;
    }
    return q;
}

// Moves the cells with the same rotation as the first one from `cells` to `alike`. Returns how many are left in `cells`.
uint32_t take_alike(const uint32_t * rotations, uint32_t * cells, uint32_t n, uint32_t * alike) {
    const uint32_t rotation = rotations[cells[0]];
    uint32_t n_left = 0;
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t cell = cells[i];
        alike[i - n_left] = cell;
        cells[n_left] = cell;
        n_left += rotations[cell] != rotation;
    }
    return n_left;
}

// One token over the cells of a chunk that it sees, some of which wait: by rotation.
template <class T>
void attend_rotated(const attend_job & job, const attend_unit & unit, uint32_t token, const uint32_t * rotations,
                    seen_cells & seen, rows<T> k, rows<T> v, float * sum, unit_queries & queries) {
    seen_cells alike;
    while (seen.n > 0) {
        const uint32_t rotation = rotations[seen.at[0]];
        const uint32_t n_left = take_alike(rotations, seen.at, seen.n, alike.at);
        alike.n = seen.n - n_left;
        alike.pad();
        seen.n = n_left;
        const float * q = queries_for(job, unit, token, rotation, queries);
        token_run<T>{job, {k, nullptr}, v, q, sum, &alike, 1, alike.n}.all();
    }
}

// How many cells two lists begin with alike.
uint32_t common_cells(const seen_cells & a, const seen_cells & b, uint32_t most) {
    uint32_t n = min_of(min_of(a.n, b.n), most);
    if (n > 0 && a.at[n - 1] == b.at[n - 1] && a.at[n - 1] - a.at[0] == n - 1 && a.at[0] == b.at[0]) {
        return n; // both without a gap
    }
    uint32_t i = 0;
    while (i < n && a.at[i] == b.at[i]) {
        ++i;
    }
    return i;
}

// A unit over one chunk: tokens one after the other that see the same cells, or the first of them, go together.
// columns: room for K of the chunk by dimensions
template <class T>
void attend_chunk(const attend_job & job, const attend_unit & unit, uint32_t first, uint32_t n, rows<T> k, rows<T> v,
                  float * partial, unit_queries & queries, float * columns) {
    const uint32_t group = job.n_head / job.n_head_kv;
    const widths w(job);
    const uint32_t * rotations = job.waiting.of_cell ? job.waiting.of_cell + first : nullptr;
    seen_cells seen[ATTEND_TOKENS];
    uint32_t n_run = 0; // tokens that wait to be computed together, the last ones
    uint32_t n_common = 0;
    key_columns turned = {columns, 0};
    const auto compute_run = [&](uint32_t end) {
        if (n_run > 0) {
            const uint32_t begin = end - n_run - unit.token_begin;
            const float * q = queries.floats + size_t{begin} * group * w.padded_k;
            const keys<T> of_run = {k, turned.for_run(k, w.k, n, seen + begin, n_run, group)};
            token_run<T>{job, of_run, v, q, partial + size_t{begin} * group * w.partial(), seen + begin, n_run, n_common}.all();
        }
        n_run = 0;
    };
    for (uint32_t t = unit.token_begin; t < unit.token_end; ++t) {
        const uint32_t i = t - unit.token_begin;
        seen[i].n = list_seen(job.mask + size_t{t} * job.n_kv + first, n, seen[i].at);
        if (seen[i].n == 0) {
            compute_run(t);
        } else if (rotations) {
            attend_rotated(job, unit, t, rotations, seen[i], k, v, partial + size_t{i} * group * w.partial(), queries);
        } else {
            seen[i].pad();
            queries_for(job, unit, t, 0, queries);
            const uint32_t common = n_run > 0 ? common_cells(seen[i - 1], seen[i], n_common) : seen[i].n;
            if (2 * common < seen[i].n) {
                compute_run(t);
            }
            n_common = n_run > 0 ? common : seen[i].n;
            ++n_run;
        }
    }
    compute_run(unit.token_end);
}

#if LANES > 4
rows<uint16_t> in_place(const attend_rows & from, uint32_t head_kv, uint32_t first) {
    return {from.data + first * from.cell_stride + head_kv * from.head_stride, from.cell_stride};
}
#endif

void run(const attend_job & whole, const attend_unit & unit, float * partial, float * scratch) {
    attend_job job = whole; // whose shares are a chunk's
    const uint32_t group = job.n_head / job.n_head_kv;
    const widths w(job);
    for (uint32_t i = 0; !job.shares && i < (unit.token_end - unit.token_begin) * group; ++i) {
        __builtin_memset(partial + i * w.partial(), 0, w.partial() * sizeof(float));
        partial[i * w.partial() + w.padded_v] = LOWEST;
    }
    unit_queries queries = {scratch, {}};
    float * k = scratch + ATTEND_TOKENS * group * w.padded_k;
    float * v = k + CHUNK * w.padded_k;
    float * columns = v + CHUNK * w.padded_v;
    const rows<float> k_rows = {reinterpret_cast<const uint8_t *>(k), w.padded_k * sizeof(float)};
    const rows<float> v_rows = {reinterpret_cast<const uint8_t *>(v), w.padded_v * sizeof(float)};
    const uint32_t end = attend_range_begin(job, unit.range + 1);
    for (uint32_t first = attend_range_begin(job, unit.range); first < end; first += CHUNK) {
        const uint32_t n = min_of(CHUNK, end - first);
        job.shares = whole.shares ? whole.shares + first : nullptr;
        if (whole.old_k.data && first >= whole.n_fresh) {
            job.k = whole.old_k;
            job.v = whole.old_v;
        }
#if LANES > 4
        if (job.k.type == GGML_TYPE_F16 && job.v.type == GGML_TYPE_F16 && job.head_dim_k == w.k && job.head_dim_v == w.v) {
            attend_chunk<uint16_t>(job, unit, first, n, in_place(job.k, unit.head_kv, first),
                                   in_place(job.v, unit.head_kv, first), partial, queries, columns);
            continue;
        }
#endif
        uint32_t wanted[CHUNK];
        const uint32_t n_wanted = list_wanted(job, unit, first, n, wanted);
        if (n_wanted > 0) {
            convert(job.k, unit.head_kv, first, job.head_dim_k, wanted, n_wanted, k);
            if (!job.shares) {
                convert(job.v, unit.head_kv, first, job.head_dim_v, wanted, n_wanted, v);
            }
            attend_chunk<float>(job, unit, first, n, k_rows, v_rows, partial, queries, columns);
        }
    }
}

// The partial results of one query head, `stride` floats apart. sink: nullptr for none
void merge_head(float * partial, size_t stride, uint32_t n_ranges, const widths & w, const float * sink, uint32_t head_dim_v,
                float * out) {
    float m = sink ? *sink : LOWEST;
    for (uint32_t r = 0; r < n_ranges; ++r) {
        m = max_of(partial[r * stride + w.padded_v], m);
    }
    float total = sink ? exp_of(splat(*sink - m))[0] : 0.0f;
    for (uint32_t r = 0; r < n_ranges; ++r) {
        const float * part = partial + r * stride;
        const float part_total = part[w.padded_v + 1];
        const float factor = part_total == 0.0f ? 0.0f : exp_of(splat(part[w.padded_v] - m))[0];
        total += part_total * factor;
        for (uint32_t d = 0; d < w.v; d += LANES) {
            const vec scaled = load(part + d) * factor;
            store(partial + d, r == 0 ? scaled : load(partial + d) + scaled);
        }
    }
    for (uint32_t d = 0; d < head_dim_v; ++d) {
        out[d] = partial[d] / total;
    }
    partial[w.padded_v] = m;
    partial[w.padded_v + 1] = total;
}

void merge(const attend_job & job, const attend_unit & unit, float * partial, size_t stride) {
    const uint32_t group = job.n_head / job.n_head_kv;
    const widths w(job);
    for (uint32_t t = unit.token_begin; t < unit.token_end; ++t) {
        for (uint32_t h = 0; h < group; ++h) {
            const uint32_t head = unit.head_kv * group + h;
            float * out = job.out + (size_t{t} * job.n_head + head) * job.head_dim_v;
            merge_head(partial, stride, job.n_ranges, w, job.sinks ? job.sinks + head : nullptr, job.head_dim_v, out);
            partial += w.partial();
        }
    }
}

// The numbers from i on as a vector, filled up with what adds nothing.
inline vec load_part(const float * x, uint32_t i, uint32_t n) {
    if (i + LANES <= n) {
        return load(x + i);
    }
    vec part = splat(LOWEST);
    for (uint32_t lane = 0; i + lane < n; ++lane) {
        part[lane] = x[i + lane];
    }
    return part;
}

softmax_parts softmax(const float * x, uint32_t n) {
    vec most = splat(LOWEST);
    for (uint32_t i = 0; i < n; i += LANES) {
        const vec part = load_part(x, i, n);
        most = part > most ? part : most;
    }
    float greatest = LOWEST;
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        greatest = max_of(most[lane], greatest);
    }
    vec sum = {};
    for (uint32_t i = 0; i < n; i += LANES) {
        sum += exp_of(load_part(x, i, n) - greatest);
    }
    float total = 0.0f;
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        total += sum[lane];
    }
    uint32_t best = 0;
    while (best + 1 < n && x[best] != greatest) {
        ++best;
    }
    return {best, greatest, total};
}

#include "cpu/recur.inl"

#include "cpu/chunks.inl"

#include "cpu/feed_forward.inl"

#include "cpu/norm.inl"

} // namespace

extern const cpu_kernels kernels;
const cpu_kernels kernels = {
    KVG_ISA_NAME,
    LANES,
    {run, merge, softmax},
    {row_to_floats, floats_to_row, rotate_heads, mix_heads},
    {convolve, recall, to_unit, pass_gate, recall_by_chunks},
    {route_rows, apply_gate<swiglu_gate>, apply_gate<geglu_gate>, apply_gate<swiglu_oai_gate>, sum_rows},
    {norm_factor, apply_norm}};

} // namespace KVG_ISA
} // namespace kvg
