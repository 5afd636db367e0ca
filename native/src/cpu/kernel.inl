// The kernel, compiled once per instruction set: LANES floats a vector, KVG_ISA the namespace. Nothing from the standard library may
// be called here: an inline function compiled for AVX-512 could be the one that the linker keeps for everybody.

#include "cpu/kernel.h"

namespace kvg {
namespace KVG_ISA {

namespace {

constexpr uint32_t CHUNK = ATTEND_CHUNK;
constexpr uint32_t CELLS = 4;                       // K rows per step
constexpr uint32_t HEADS = LANES == 16 ? 4 : 2;     // query heads per step of K, as the registers allow
constexpr uint32_t V_VECTORS = LANES == 16 ? 4 : 2; // of a V row per pass
constexpr uint64_t ALL_HIDDEN = 0xfc00fc00fc00fc00; // four times -infinity
constexpr float LOWEST = -__builtin_inff();

#include "cpu/vectors.inl"

#include "cpu/rows.inl"

// Floats of a unit's heads.
struct widths {
    uint32_t k; // of a row, in whole vectors
    uint32_t v;
    uint32_t padded_k; // from one query head to the next
    uint32_t padded_v; // of a sum of V
    explicit widths(const attend_job & job)
        : k((job.head_dim_k + LANES - 1) / LANES * LANES), v((job.head_dim_v + LANES - 1) / LANES * LANES),
          padded_k(attend_padded(job.head_dim_k)), padded_v(attend_padded(job.head_dim_v)) {}
    uint32_t partial() const { return attend_partial_floats(padded_v); } // from one sum of V to the next
};

// Rows of one head as vectors can read them: in the cache itself, or converted.
template <class T> struct rows {
    const uint8_t * data;
    size_t stride;
    const T * operator[](uint32_t cell) const { return reinterpret_cast<const T *>(data + cell * stride); }
};

// What a token sees of 16 cells.
enum class sight {
    none,
    some,
    all
};

inline sight look(const uint16_t * mask) {
    uint64_t w[4];
    __builtin_memcpy(w, mask, sizeof(w));
    if ((w[0] & w[1] & w[2] & w[3]) == ALL_HIDDEN) {
        return sight::none;
    }
    return (w[0] | w[1] | w[2] | w[3]) == 0 ? sight::all : sight::some;
}

// Lists the cells of a chunk that a token sees. Returns how many. Most of what a window hides costs a look at 16 cells.
uint32_t list_seen(const uint16_t * mask, uint32_t n, uint32_t * seen) {
    uint32_t n_seen = 0;
    for (uint32_t c = 0; c < n; c += 16) {
        const uint32_t end = min_of(c + 16, n);
        const sight sees = end - c == 16 ? look(mask + c) : sight::some;
        if (sees == sight::all) {
            for (uint32_t i = 0; i < 16; ++i) {
                seen[n_seen + i] = c + i;
            }
            n_seen += 16;
        } else if (sees == sight::some) {
            for (uint32_t i = c; i < end; ++i) {
                seen[n_seen] = i;
                n_seen += mask[i] == 0;
            }
        }
    }
    return n_seen;
}

// The same cell of the next chunk: the machine's own prefetching doesn't follow rows that are strides apart.
template <class T> inline void prefetch(const T * row, size_t stride, uint32_t n_dims) {
    const char * next = reinterpret_cast<const char *>(row) + CHUNK * stride;
    for (uint32_t line = 0; line < n_dims * sizeof(T); line += 64) {
        __builtin_prefetch(next + line, 0, 2);
    }
}

// weights[h][i] = q[h] . k[seen[i]] for NQ queries and CELLS cells at a time, i from begin on; `seen` is padded with valid cells.
template <uint32_t NQ, class T>
void dot_rows(const float * q, uint32_t padded, rows<T> k, uint32_t n_dims, const uint32_t * seen, uint32_t begin, uint32_t end,
              float * weights) {
    for (uint32_t i = begin; i < end; i += CELLS) {
        const T * row[CELLS];
        for (uint32_t c = 0; c < CELLS; ++c) {
            row[c] = k[seen[i + c]];
            prefetch(row[c], k.stride, n_dims);
        }
        vec acc[NQ][CELLS] = {};
        for (uint32_t d = 0; d < n_dims; d += LANES) {
            vec kd[CELLS];
            for (uint32_t c = 0; c < CELLS; ++c) {
                kd[c] = load(row[c] + d);
            }
            for (uint32_t h = 0; h < NQ; ++h) {
                const vec qd = load(q + h * padded + d);
                for (uint32_t c = 0; c < CELLS; ++c) {
                    acc[h][c] += qd * kd[c];
                }
            }
        }
        for (uint32_t h = 0; h < NQ; ++h) {
            const vec4 dots = sums(acc[h][0], acc[h][1], acc[h][2], acc[h][3]);
            __builtin_memcpy(weights + h * CHUNK + i, &dots, sizeof(dots));
        }
    }
}

// sum[h] += weights[h][i] * v[seen[i]] for i from begin to end, NV vectors of the rows from dimension d.
template <uint32_t NQ, uint32_t NV, class T>
void add_rows(float * sum, uint32_t stride, uint32_t d, rows<T> v, const uint32_t * seen, uint32_t begin, uint32_t end,
              const float * weights) {
    vec acc[NQ][NV];
    for (uint32_t h = 0; h < NQ; ++h) {
        for (uint32_t x = 0; x < NV; ++x) {
            acc[h][x] = load(sum + h * stride + d + x * LANES);
        }
    }
    for (uint32_t i = begin; i < end; ++i) {
        const T * row = v[seen[i]] + d;
        prefetch(row, v.stride, NV * LANES);
        vec vx[NV];
        for (uint32_t x = 0; x < NV; ++x) {
            vx[x] = load(row + x * LANES);
        }
        for (uint32_t h = 0; h < NQ; ++h) {
            for (uint32_t x = 0; x < NV; ++x) {
                acc[h][x] += weights[h * CHUNK + i] * vx[x];
            }
        }
    }
    for (uint32_t h = 0; h < NQ; ++h) {
        for (uint32_t x = 0; x < NV; ++x) {
            store(sum + h * stride + d + x * LANES, acc[h][x]);
        }
    }
}

// All of a row of V.
template <uint32_t NQ, class T>
void add_whole_rows(float * sum, const widths & w, rows<T> v, const uint32_t * seen, uint32_t begin, uint32_t end,
                    const float * weights) {
    uint32_t d = 0;
    for (; d + V_VECTORS * LANES <= w.v; d += V_VECTORS * LANES) {
        add_rows<NQ, V_VECTORS>(sum, w.partial(), d, v, seen, begin, end, weights);
    }
    for (; d < w.v; d += LANES) {
        add_rows<NQ, 1>(sum, w.partial(), d, v, seen, begin, end, weights);
    }
}

// Fills scores up to whole vectors. Returns how many there are then.
uint32_t fill_up(float * scores, uint32_t n, float with) {
    const uint32_t end = (n + LANES - 1) / LANES * LANES;
    for (uint32_t i = n; i < end; ++i) {
        scores[i] = with;
    }
    return end;
}

// Scores that come divided by the cap.
void cap_scores(float * scores, uint32_t n, float soft_cap) {
    const uint32_t end = fill_up(scores, n, 0.0f);
    for (uint32_t i = 0; i < end; i += LANES) {
        store(scores + i, tanh_of(load(scores + i)) * soft_cap);
    }
}

// The scores of one head become weights relative to its maximum, and what it has so far is brought to that maximum.
void soften(float * weights, uint32_t n_seen, float * sum, const widths & w) {
    float & highest = sum[w.padded_v];
    float & total = sum[w.padded_v + 1];
    const uint32_t end = fill_up(weights, n_seen, LOWEST);
    vec most = load(weights);
    for (uint32_t i = LANES; i < end; i += LANES) {
        const vec score = load(weights + i);
        most = score > most ? score : most;
    }
    float m = highest;
    for (uint32_t x = 0; x < LANES; ++x) {
        m = max_of(most[x], m);
    }
    vec added = {};
    for (uint32_t i = 0; i < end; i += LANES) {
        const vec weight = exp_of(load(weights + i) - m);
        store(weights + i, weight);
        added += weight;
    }
    const float before = total == 0.0f ? 0.0f : exp_of(splat(highest - m))[0];
    const vec4 four = fold(added);
    // the padding, at e^-87 each, is far below a rounding of the greatest weight, 1
    total = total * before + ((four[0] + four[1]) + (four[2] + four[3]));
    highest = m;
    if (before != 1.0f) {
        for (uint32_t d = 0; d < w.v; d += LANES) {
            store(sum + d, load(sum + d) * before);
        }
    }
}

// The cells of a chunk that a token sees, in rising order, with room for CELLS more.
struct seen_cells {
    uint32_t at[CHUNK + CELLS];
    uint32_t n;

    void pad() {
        for (uint32_t c = 0; c < CELLS; ++c) {
            at[n + c] = at[0];
        }
    }
};

// NQ queries: query heads of one token, or of tokens beside each other. seen: of each query's token; the first n_common are the same.
// What a query gets doesn't depend on the others: each of its sums has the same terms in the same order.
template <uint32_t NQ, class T>
void attend_queries(const attend_job & job, const float * q, float * sum, rows<T> k, rows<T> v,
                    const seen_cells * const (&seen)[NQ], uint32_t n_common) {
    const widths w(job);
    float weights[NQ * CHUNK];
    const uint32_t n_whole = n_common / CELLS * CELLS;
    dot_rows<NQ>(q, w.padded_k, k, w.k, seen[0]->at, 0, n_whole, weights);
    for (uint32_t h = 0; h < NQ; ++h) {
        float * own = weights + h * CHUNK;
        dot_rows<1>(q + h * w.padded_k, w.padded_k, k, w.k, seen[h]->at, n_whole, seen[h]->n, own);
        if (job.soft_cap != 0.0f) {
            cap_scores(own, seen[h]->n, job.soft_cap);
        }
        soften(own, seen[h]->n, sum + h * w.partial(), w);
    }
    add_whole_rows<NQ>(sum, w, v, seen[0]->at, 0, n_common, weights);
    for (uint32_t h = 0; h < NQ; ++h) {
        if (n_common < seen[h]->n) {
            add_whole_rows<1>(sum + h * w.partial(), w, v, seen[h]->at, n_common, seen[h]->n, weights + h * CHUNK);
        }
    }
}

// Tokens beside each other with all of their query heads for a KV head, HEADS at a time. q: (padded_k, group, n); sum: likewise;
// seen: of each token, none of them empty
template <class T> struct token_run {
    const attend_job & job;
    rows<T> k;
    rows<T> v;
    const float * q;
    float * sum;
    const seen_cells * seen;
    uint32_t n_tokens;
    uint32_t n_common;

    template <uint32_t NQ> void some(uint32_t begin) const {
        const widths w(job);
        const uint32_t group = job.n_head / job.n_head_kv;
        const seen_cells * of_each[NQ];
        for (uint32_t h = 0; h < NQ; ++h) {
            of_each[h] = seen + (begin + h) / group;
        }
        attend_queries<NQ>(job, q + size_t{begin} * w.padded_k, sum + size_t{begin} * w.partial(), k, v, of_each, n_common);
    }
    void all() const {
        const uint32_t n = n_tokens * (job.n_head / job.n_head_kv);
        uint32_t i = 0;
        for (; i + HEADS <= n; i += HEADS) {
            some<HEADS>(i);
        }
        if (HEADS == 4 && n - i == 3) {
            return some<HEADS - 1>(i);
        }
        if (HEADS == 4 && n - i == 2) {
            return some<HEADS / 2>(i);
        }
        for (; i < n; ++i) {
            some<1>(i);
        }
    }
};

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
        token_run<T>{job, k, v, q, sum, &alike, 1, alike.n}.all();
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
template <class T>
void attend_chunk(const attend_job & job, const attend_unit & unit, uint32_t first, uint32_t n, rows<T> k, rows<T> v,
                  float * partial, unit_queries & queries) {
    const uint32_t group = job.n_head / job.n_head_kv;
    const widths w(job);
    const uint32_t * rotations = job.waiting.of_cell ? job.waiting.of_cell + first : nullptr;
    seen_cells seen[ATTEND_TOKENS];
    uint32_t n_run = 0; // tokens that wait to be computed together, the last ones
    uint32_t n_common = 0;
    const auto compute_run = [&](uint32_t end) {
        if (n_run > 0) {
            const uint32_t begin = end - n_run - unit.token_begin;
            const float * q = queries.floats + size_t{begin} * group * w.padded_k;
            token_run<T>{job, k, v, q, partial + size_t{begin} * group * w.partial(), seen + begin, n_run, n_common}.all();
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

void run(const attend_job & job, const attend_unit & unit, float * partial, float * scratch) {
    const uint32_t group = job.n_head / job.n_head_kv;
    const widths w(job);
    for (uint32_t i = 0; i < (unit.token_end - unit.token_begin) * group; ++i) {
        __builtin_memset(partial + i * w.partial(), 0, w.partial() * sizeof(float));
        partial[i * w.partial() + w.padded_v] = LOWEST;
    }
    unit_queries queries = {scratch, {}};
    float * k = scratch + ATTEND_TOKENS * group * w.padded_k;
    float * v = k + CHUNK * w.padded_k;
    const rows<float> k_rows = {reinterpret_cast<const uint8_t *>(k), w.padded_k * sizeof(float)};
    const rows<float> v_rows = {reinterpret_cast<const uint8_t *>(v), w.padded_v * sizeof(float)};
    const uint32_t end = attend_range_begin(job, unit.range + 1);
    for (uint32_t first = attend_range_begin(job, unit.range); first < end; first += CHUNK) {
        const uint32_t n = min_of(CHUNK, end - first);
#if LANES > 4
        if (job.k.type == GGML_TYPE_F16 && job.v.type == GGML_TYPE_F16 && job.head_dim_k == w.k && job.head_dim_v == w.v) {
            attend_chunk<uint16_t>(job, unit, first, n, in_place(job.k, unit.head_kv, first),
                                   in_place(job.v, unit.head_kv, first), partial, queries);
            continue;
        }
#endif
        uint32_t wanted[CHUNK];
        const uint32_t n_wanted = list_wanted(job, unit, first, n, wanted);
        if (n_wanted > 0) {
            convert(job.k, unit.head_kv, first, job.head_dim_k, wanted, n_wanted, k);
            convert(job.v, unit.head_kv, first, job.head_dim_v, wanted, n_wanted, v);
            attend_chunk<float>(job, unit, first, n, k_rows, v_rows, partial, queries);
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

#include "cpu/feed_forward.inl"

} // namespace

extern const cpu_kernels kernels;
const cpu_kernels kernels = {
    KVG_ISA_NAME,          LANES,
    {run, merge, softmax}, {row_to_floats, floats_to_row, rotate_heads, mix_heads},
    {convolve, recall},    {apply_gate<swiglu_gate>, apply_gate<geglu_gate>, apply_gate<swiglu_oai_gate>, sum_rows}};

} // namespace KVG_ISA
} // namespace kvg
