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
constexpr uint64_t ALL_HIDDEN = 0xfc00fc00fc00fc00; // four times ATTEND_HIDDEN
constexpr float LOWEST = -__builtin_inff();

#include "cpu/vectors.inl"

#include "cpu/rows.inl"

#include "cpu/attend_queries.inl"

// The cells of a unit's range: of all its tokens from the least `begin` up to the greatest `end`.
struct cell_range {
    uint32_t begin;
    uint32_t end;
};

cell_range range_of(const attend_job & job, uint32_t token, uint32_t range) {
    if (!job.range_begins) {
        return {0, job.n_kv};
    }
    const uint32_t * begins = job.range_begins + size_t{range} * job.n_tokens + token;
    return {begins[0], begins[job.n_tokens]};
}

cell_range range_of_all(const attend_job & job, const attend_unit & unit) {
    cell_range all = {job.n_kv, 0};
    for (uint32_t t = unit.token_begin; t < unit.token_end; ++t) {
        const cell_range one = range_of(job, t, unit.range);
        all.begin = min_of(all.begin, one.begin);
        all.end = all.end > one.end ? all.end : one.end;
    }
    return all;
}

// The part of a token's range that is in the chunk of n cells from `first` on, relative to these. Empty where it is elsewhere.
cell_range range_in_chunk(const attend_job & job, uint32_t token, uint32_t range, uint32_t first, uint32_t n) {
    const cell_range own = range_of(job, token, range);
    return {own.begin > first ? own.begin - first : 0, own.end > first ? min_of(own.end - first, n) : 0};
}

// Lists the cells of a chunk that any token of a unit sees in its range. Returns how many.
uint32_t list_wanted(const attend_job & job, const attend_unit & unit, uint32_t first, uint32_t n, uint32_t * wanted) {
    uint16_t all[CHUNK];
    for (uint16_t & each : all) {
        each = ATTEND_HIDDEN;
    }
    for (uint32_t t = unit.token_begin; t < unit.token_end; ++t) {
        const uint16_t * mask = job.mask + size_t{t} * job.n_kv + first;
        const cell_range own = range_in_chunk(job, t, unit.range, first, n);
        for (uint32_t c = own.begin; c < own.end; ++c) {
            all[c] &= mask[c];
        }
    }
    return list_seen(all, 0, n, wanted);
}

// The cells of a chunk.
struct chunk_cells {
    uint32_t first;
    uint32_t n;
    const uint32_t * order; // from the chunk's first column on; nullptr: as they lie

    chunk_cells(const attend_job & job, uint32_t first)
        : first(first), n(min_of(CHUNK, job.n_kv - first)), order(job.order ? job.order + first : nullptr) {
        if (order && is_run()) {
            this->first = order[0];
            order = nullptr;
        }
    }
    uint32_t operator[](uint32_t column) const { return order ? order[column] : first + column; }

private:
    bool is_run() const {
        uint32_t differ = 0;
        for (uint32_t i = 0; i < n; ++i) {
            differ |= order[i] ^ (order[0] + i);
        }
        return differ == 0;
    }
};

// The rows of K or V that have a cell.
const attend_rows & rows_at(const attend_rows & fresh, const attend_rows & old, const attend_job & job, uint32_t cell) {
    return old.data && cell >= job.n_fresh ? old : fresh;
}

// Rows that vectors can't read where they are, as floats: those of a chunk that are wanted.
void convert(const attend_job & job, const attend_rows & fresh, const attend_rows & old, uint32_t head_kv,
             const chunk_cells & cells, uint32_t head_dim, const uint32_t * wanted, uint32_t n_wanted, float * to) {
    const uint32_t padded = attend_padded(head_dim);
    for (uint32_t i = 0; i < n_wanted; ++i) {
        const uint32_t cell = cells[wanted[i]];
        const attend_rows & from = rows_at(fresh, old, job, cell);
        const uint8_t * row = from.data + cell * from.cell_stride + head_kv * from.head_stride;
        float * out = to + wanted[i] * padded;
        prefetch(row, from.cell_stride, static_cast<uint32_t>(ggml_row_size(from.type, head_dim)));
        row_to_floats(from.type, row, out, head_dim);
        __builtin_memset(out + head_dim, 0, (padded - head_dim) * sizeof(float));
    }
}

// The queries of a unit: scaled, padded with zeros, and rotated for the cells that they were used for last.
struct unit_queries {
    float * floats;                 // (padded, group, tokens)
    uint32_t has[ATTEND_TOKENS];    // each token's rotation + 1; 0: the token has no queries yet
    uint32_t n_seen[ATTEND_TOKENS]; // cells of the range by each token, so far
};

void scale_queries(const attend_job & job, uint32_t token, uint32_t head_kv, float * q) {
    const uint32_t group = job.n_head / job.n_head_kv;
    const uint32_t padded = attend_padded(job.head_dim_k);
    const float scale = job.soft_cap == 0.0f ? job.scale : job.scale / job.soft_cap;
    const float * from = job.q + (size_t{token} * job.n_head + head_kv * group) * job.head_dim_k;
    for (uint32_t h = 0; h < group; ++h) {
        for (uint32_t d = 0; d < job.head_dim_k; ++d) {
            q[h * padded + d] = from[h * job.head_dim_k + d] * scale;
        }
        for (uint32_t d = job.head_dim_k; d < padded; ++d) {
            q[h * padded + d] = 0.0f;
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
    alike.n_before = seen.n_before;
    alike.position = seen.position;
    while (seen.n > 0) {
        const uint32_t rotation = rotations[seen.at[0]];
        const uint32_t n_left = take_alike(rotations, seen.at, seen.n, alike.at);
        alike.n = seen.n - n_left;
        alike.pad();
        seen.n = n_left;
        const float * q = queries_for(job, unit, token, rotation, queries);
        token_run<T>{job, {k, nullptr}, v, q, sum, &alike, 1, alike.n}.all();
        alike.n_before += alike.n;
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
// rotations: of each column's cell; nullptr: none waits. columns: room for K of the chunk by dimensions
template <class T>
void attend_chunk(const attend_job & job, const attend_unit & unit, uint32_t first, uint32_t n, const uint32_t * rotations,
                  rows<T> k, rows<T> v, float * partial, unit_queries & queries, float * columns) {
    const uint32_t group = job.n_head / job.n_head_kv;
    const widths w(job);
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
        const cell_range own = range_in_chunk(job, t, unit.range, first, n);
        seen[i].n = list_seen(job.mask + size_t{t} * job.n_kv + first, own.begin, own.end, seen[i].at);
        seen[i].n_before = queries.n_seen[i];
        seen[i].position = job.slopes ? job.token_positions[t] : 0;
        queries.n_seen[i] += seen[i].n;
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

// Which of the job's rotations the cells of a chunk wait for.
struct chunk_rotations {
    uint32_t gathered[CHUNK];
    const uint32_t * of_cell; // nullptr: none waits

    chunk_rotations(const attend_job & job, const chunk_cells & cells)
        : of_cell(job.waiting.of_cell ? job.waiting.of_cell + cells.first : nullptr) {
        if (of_cell && cells.order) {
            for (uint32_t i = 0; i < cells.n; ++i) {
                gathered[i] = job.waiting.of_cell[cells[i]];
            }
            of_cell = gathered;
        }
    }
};

#if LANES > 4
// Whether vectors can read the rows of a chunk where they are.
bool is_in_place(const attend_job & job, const chunk_cells & cells) {
    return !cells.order && (!job.old_k.data || cells.first + cells.n <= job.n_fresh) && job.k.type == GGML_TYPE_F16 &&
           job.v.type == GGML_TYPE_F16 && job.head_dim_k % LANES == 0 && job.head_dim_v % LANES == 0;
}

rows<uint16_t> in_place(const attend_rows & from, uint32_t head_kv, uint32_t first) {
    return {from.data + first * from.cell_stride + head_kv * from.head_stride, from.cell_stride};
}
#endif

// Calls visit(token, query head, place in the unit's partial result) for each query head of a unit.
template <class F> void each_head(const attend_job & job, const attend_unit & unit, F visit) {
    const uint32_t group = job.n_head / job.n_head_kv;
    uint32_t place = 0;
    for (uint32_t t = unit.token_begin; t < unit.token_end; ++t) {
        for (uint32_t h = 0; h < group; ++h) {
            visit(t, unit.head_kv * group + h, place++);
        }
    }
}

void add(const attend_job & job, const attend_unit & unit, float * partial, const float * added) {
    const widths w(job);
    each_head(job, unit, [&](uint32_t, uint32_t, uint32_t place) {
        float * sum = partial + place * w.partial();
        const float * other = added + place * w.partial();
        const float power = max_of(other[w.power()], sum[w.power()]);
        const float factor = power_of_two(sum[w.power()] - power);
        const float factor_other = power_of_two(other[w.power()] - power);
        for (uint32_t d = 0; d < w.sums(); d += LANES) {
            store(sum + d, load(sum + d) * factor + load(other + d) * factor_other);
        }
        sum[w.power()] = power;
    });
}

// Where a thread has what it works with.
struct unit_scratch {
    float * k; // of a chunk, as floats
    float * v;
    float * columns;
    float * added; // a range's partial result

    unit_scratch(const attend_job & job, const widths & w, float * scratch) {
        k = scratch + ATTEND_TOKENS * (job.n_head / job.n_head_kv) * w.padded_k;
        v = k + CHUNK * w.padded_k;
        columns = v + CHUNK * w.padded_v;
        added = columns + CHUNK * w.padded_k;
    }
};

// One of a unit's ranges. partial: its result; untouched where shares are asked for
void run_range(const attend_job & whole, const attend_unit & unit, float * partial, unit_queries & queries,
               const unit_scratch & scratch) {
    attend_job job = whole; // whose shares and positions are a chunk's, and slopes those of the unit's heads
    job.slopes += job.slopes ? unit.head_kv * (job.n_head / job.n_head_kv) : 0;
    const widths w(job);
    each_head(job, unit, [&](uint32_t, uint32_t, uint32_t place) {
        if (!job.shares) {
            __builtin_memset(partial + place * w.partial(), 0, w.partial() * sizeof(float));
            partial[place * w.partial() + w.power()] = LOWEST;
        }
    });
    __builtin_memset(queries.n_seen, 0, sizeof(queries.n_seen));
    const rows<float> k_rows = {reinterpret_cast<const uint8_t *>(scratch.k), w.padded_k * sizeof(float)};
    const rows<float> v_rows = {reinterpret_cast<const uint8_t *>(scratch.v), w.padded_v * sizeof(float)};
    const cell_range range = range_of_all(job, unit);
    for (uint32_t first = range.begin / CHUNK * CHUNK; first < range.end; first += CHUNK) {
        const chunk_cells cells(job, first);
        const chunk_rotations rotations(job, cells);
        job.shares = whole.shares ? whole.shares + first : nullptr;
        job.cell_positions = whole.slopes ? whole.cell_positions + first : nullptr;
#if LANES > 4
        if (is_in_place(job, cells)) {
            attend_chunk<uint16_t>(job, unit, first, cells.n, rotations.of_cell, in_place(job.k, unit.head_kv, cells.first),
                                   in_place(job.v, unit.head_kv, cells.first), partial, queries, scratch.columns);
            continue;
        }
#endif
        uint32_t wanted[CHUNK];
        const uint32_t n_wanted = list_wanted(job, unit, first, cells.n, wanted);
        if (n_wanted > 0) {
            convert(job, job.k, job.old_k, unit.head_kv, cells, job.head_dim_k, wanted, n_wanted, scratch.k);
            if (!job.shares) {
                convert(job, job.v, job.old_v, unit.head_kv, cells, job.head_dim_v, wanted, n_wanted, scratch.v);
            }
            attend_chunk<float>(job, unit, first, cells.n, rotations.of_cell, k_rows, v_rows, partial, queries,
                                scratch.columns);
        }
    }
}

void run(const attend_job & job, const attend_unit & unit, float * partial, float * scratch) {
    const unit_scratch own(job, widths(job), scratch);
    unit_queries queries = {scratch, {}, {}};
    run_range(job, unit, partial, queries, own);
    for (attend_unit next = unit; ++next.range < unit.range_end;) {
        run_range(job, next, own.added, queries, own);
        add(job, unit, partial, own.added);
    }
}

// sink: nullptr for none
void finish_head(float * sum, const widths & w, const float * sink, uint32_t head_dim_v, float * out) {
    const vec4 four = fold(load(sum + w.padded_v));
    float total = (four[0] + four[1]) + (four[2] + four[3]);
    float factor = 1.0f;
    if (sink) {
        const float power = max_of(power_of(*sink), sum[w.power()]);
        factor = power_of_two(sum[w.power()] - power);
        total = total * factor + exp_below(splat(*sink), power)[0];
        sum[w.power()] = power;
    }
    for (uint32_t d = 0; d < head_dim_v; ++d) {
        out[d] = sum[d] * factor / total;
    }
    sum[w.total()] = total;
}

void finish(const attend_job & job, const attend_unit & unit, float * partial) {
    const widths w(job);
    each_head(job, unit, [&](uint32_t token, uint32_t head, uint32_t place) {
        float * out = job.out + (size_t{token} * job.n_head + head) * job.head_dim_v;
        finish_head(partial + place * w.partial(), w, job.sinks ? job.sinks + head : nullptr, job.head_dim_v, out);
    });
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
    {run, add, finish, softmax},
    {row_to_floats, floats_to_row, rotate_heads, mix_heads},
    {convolve, recall, to_unit, pass_gate, recall_by_chunks},
    {route_rows, apply_gate<swiglu_gate>, apply_gate<geglu_gate>, apply_gate<swiglu_oai_gate>, sum_rows},
    {norm_factor, apply_norm}};

} // namespace KVG_ISA
} // namespace kvg
