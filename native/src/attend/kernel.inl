// The kernel, compiled once per instruction set: LANES floats a vector, KVG_ISA the namespace. Nothing from the standard library may
// be called here: an inline function compiled for AVX-512 could be the one that the linker keeps for everybody.

#include "attend/kernel.h"

namespace kvg {
namespace KVG_ISA {

namespace {

constexpr uint32_t CHUNK = ATTEND_CHUNK;
constexpr uint32_t CELLS = 4;                       // K rows per step
constexpr uint32_t HEADS = LANES == 16 ? 4 : 2;     // query heads per step of K, as the registers allow
constexpr uint32_t V_VECTORS = LANES == 16 ? 4 : 2; // of a V row per pass
constexpr uint64_t ALL_HIDDEN = 0xfc00fc00fc00fc00; // four times -infinity
constexpr float LOWEST = -__builtin_inff();

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef int32_t int_vec __attribute__((vector_size(LANES * 4)));
typedef int8_t int8_vec __attribute__((vector_size(LANES)));
typedef uint8_t uint8_vec __attribute__((vector_size(LANES)));
typedef float vec4 __attribute__((vector_size(16)));

template <class V> inline V load_as(const void * p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
}

inline vec load(const float * p) { return load_as<vec>(p); }
#if LANES == 16
inline vec load(const uint16_t * p) { return reinterpret_cast<vec>(_mm512_maskz_cvtph_ps(0xffff, load_as<__m256i>(p))); }
#elif LANES == 8
inline vec load(const uint16_t * p) { return reinterpret_cast<vec>(_mm256_cvtph_ps(load_as<__m128i>(p))); }
#endif
inline void store(float * p, vec v) { __builtin_memcpy(p, &v, sizeof(v)); }
inline vec splat(float x) { return x - vec{}; }

inline float max_of(float a, float b) { return a > b ? a : b; } // a NaN in a stays unseen, and comes back in the weights
inline uint32_t min_of(uint32_t a, uint32_t b) { return a < b ? a : b; }

// GCC has the one since version 12 only, and Clang hasn't the other.
#ifdef __clang__
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t ivec4 __attribute__((vector_size(16)));
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, ivec4{i, j, k, l})
#endif

// Halves added up until 4 partial sums are left.
inline vec4 fold(vec v) {
    vec4 parts[LANES / 4];
    __builtin_memcpy(parts, &v, sizeof(v));
#if LANES == 16
    return (parts[0] + parts[2]) + (parts[1] + parts[3]);
#elif LANES == 8
    return parts[0] + parts[1];
#else
    return parts[0];
#endif
}

// The sums of four vectors' lanes.
inline vec4 sums(vec a, vec b, vec c, vec d) {
    const vec4 a4 = fold(a), b4 = fold(b), c4 = fold(c), d4 = fold(d);
    const vec4 ab = SHUFFLE(a4, b4, 0, 4, 2, 6) + SHUFFLE(a4, b4, 1, 5, 3, 7);
    const vec4 cd = SHUFFLE(c4, d4, 0, 4, 2, 6) + SHUFFLE(c4, d4, 1, 5, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

// e^x for x <= 0, to 2 units in the last place: 2^n times a polynomial of what is left, |r| <= ln(2) / 2. Below -87 it stays at e^-87.
inline vec exp_of(vec x) {
    const vec lowest = splat(-87.0f);
    x = x < lowest ? lowest : x;
    const vec magic = splat(12582912.0f); // 1.5 * 2^23: rounds, and leaves the integer in the low bits
    const vec shifted = x * 1.44269504f + magic;
    const vec n = shifted - magic;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f; // ln(2) in two parts
    vec p = splat(1.0f / 720) * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const uvec exponent = reinterpret_cast<uvec>(shifted) << 23;
    const vec power = reinterpret_cast<vec>(reinterpret_cast<uvec>(p) + exponent);
    return x == x ? power : x; // shifting would make a number of some NaNs
}

// Rows of one head as vectors can read them: in the cache itself, or converted.
template <class T> struct rows {
    const uint8_t * data;
    size_t stride;
    const T * operator[](uint32_t cell) const { return reinterpret_cast<const T *>(data + cell * stride); }
};

// Lists the cells of a chunk that a token sees. Returns how many.
uint32_t list_seen(const uint16_t * mask, uint32_t n, uint32_t * seen) {
    uint32_t n_seen = 0;
    for (uint32_t c = 0; c < n; c += 4) {
        if (c + 4 <= n && load_as<uint64_t>(mask + c) == ALL_HIDDEN) {
            continue;
        }
        for (uint32_t i = c; i < min_of(c + 4, n); ++i) {
            seen[n_seen] = i;
            n_seen += mask[i] == 0;
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

// weights[h][i] = q[h] . k[seen[i]] for NQ heads and CELLS cells at a time; `seen` is padded with valid cells.
template <uint32_t NQ, class T>
void dot_rows(const float * q, uint32_t padded, rows<T> k, uint32_t n_dims, const uint32_t * seen, uint32_t n_seen,
              float * weights) {
    for (uint32_t i = 0; i < n_seen; i += CELLS) {
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

// sum[h] += weights[h][i] * v[seen[i]], NV vectors of the rows from dimension d.
template <uint32_t NQ, uint32_t NV, class T>
void add_rows(float * const * sum, uint32_t d, rows<T> v, const uint32_t * seen, uint32_t n_seen, const float * weights) {
    vec acc[NQ][NV];
    for (uint32_t h = 0; h < NQ; ++h) {
        for (uint32_t x = 0; x < NV; ++x) {
            acc[h][x] = load(sum[h] + d + x * LANES);
        }
    }
    for (uint32_t i = 0; i < n_seen; ++i) {
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
            store(sum[h] + d + x * LANES, acc[h][x]);
        }
    }
}

// The scores of one head become weights relative to its maximum, and what it has so far is brought to that maximum.
void soften(float * weights, uint32_t n_seen, float * sum, uint32_t padded, uint32_t n_dims) {
    float & highest = sum[padded];
    float & total = sum[padded + 1];
    const uint32_t end = (n_seen + LANES - 1) / LANES * LANES;
    for (uint32_t i = n_seen; i < end; ++i) {
        weights[i] = LOWEST;
    }
    vec most = load(weights);
    for (uint32_t i = LANES; i < end; i += LANES) {
        const vec w = load(weights + i);
        most = w > most ? w : most;
    }
    float m = highest;
    for (uint32_t x = 0; x < LANES; ++x) {
        m = max_of(most[x], m);
    }
    vec added = {};
    for (uint32_t i = 0; i < end; i += LANES) {
        const vec w = exp_of(load(weights + i) - m);
        store(weights + i, w);
        added += w;
    }
    const float before = total == 0.0f ? 0.0f : exp_of(splat(highest - m))[0];
    const vec4 four = fold(added);
    // the padding, at e^-87 each, is far below a rounding of the greatest weight, 1
    total = total * before + ((four[0] + four[1]) + (four[2] + four[3]));
    highest = m;
    if (before != 1.0f) {
        for (uint32_t d = 0; d < n_dims; d += LANES) {
            store(sum + d, load(sum + d) * before);
        }
    }
}

// NQ query heads of one token over the cells that it sees.
template <uint32_t NQ, class T>
void attend_heads(const float * q, float * sum, uint32_t padded, uint32_t n_dims, rows<T> k, rows<T> v, const uint32_t * seen,
                  uint32_t n_seen) {
    float weights[NQ * CHUNK];
    float * sums_of[NQ];
    dot_rows<NQ>(q, padded, k, n_dims, seen, n_seen, weights);
    for (uint32_t h = 0; h < NQ; ++h) {
        sums_of[h] = sum + h * attend_partial_floats(padded);
        soften(weights + h * CHUNK, n_seen, sums_of[h], padded, n_dims);
    }
    uint32_t d = 0;
    for (; d + V_VECTORS * LANES <= n_dims; d += V_VECTORS * LANES) {
        add_rows<NQ, V_VECTORS>(sums_of, d, v, seen, n_seen, weights);
    }
    for (; d < n_dims; d += LANES) {
        add_rows<NQ, 1>(sums_of, d, v, seen, n_seen, weights);
    }
}

// All query heads of one token that share a KV head. sum: attend_partial_floats() for each
template <class T>
void attend_group(const float * q, float * sum, uint32_t group, uint32_t padded, uint32_t n_dims, rows<T> k, rows<T> v,
                  const uint32_t * seen, uint32_t n_seen) {
    const uint32_t partial = attend_partial_floats(padded);
    uint32_t h = 0;
    for (; h + HEADS <= group; h += HEADS) {
        attend_heads<HEADS>(q + h * padded, sum + h * partial, padded, n_dims, k, v, seen, n_seen);
    }
    for (; h < group; ++h) {
        attend_heads<1>(q + h * padded, sum + h * partial, padded, n_dims, k, v, seen, n_seen);
    }
}

inline float half_at(const uint8_t * p) {
    const auto bits = load_as<ggml_fp16_t>(p);
#if LANES > 4
    return _cvtsh_ss(bits);
#else
    return ggml_fp16_to_fp32(bits);
#endif
}

// Blocks of 32 as ggml packs them: a scale in F16, in some types an offset or a fifth bit of each value, and the values; of those of 4
// bits the first half in the lower halves of the bytes. ggml's own conversions are compiled for any CPU.
template <ggml_type TYPE> void blocks_to_floats(const void * from, float * to, int64_t n) {
    constexpr uint32_t BLOCK = 32;
    constexpr bool OFFSET = TYPE == GGML_TYPE_Q4_1 || TYPE == GGML_TYPE_Q5_1;
    constexpr bool FIFTH = TYPE == GGML_TYPE_Q5_0 || TYPE == GGML_TYPE_Q5_1;
    constexpr uint32_t HEADER = (OFFSET ? 4 : 2) + (FIFTH ? 4 : 0);
    constexpr uint32_t BYTES = HEADER + (TYPE == GGML_TYPE_Q8_0 ? BLOCK : BLOCK / 2);
    const auto * block = static_cast<const uint8_t *>(from);
    uvec lane;
    for (uint32_t i = 0; i < LANES; ++i) {
        lane[i] = i;
    }
    for (float * end = to + n; to < end; to += BLOCK, block += BYTES) {
        const float scale = half_at(block);
        const uint8_t * values = block + HEADER;
        if constexpr (TYPE == GGML_TYPE_Q8_0) {
            for (uint32_t i = 0; i < BLOCK; i += LANES) {
                store(to + i, __builtin_convertvector(load_as<int8_vec>(values + i), vec) * scale);
            }
            continue;
        }
        const float lowest = OFFSET ? half_at(block + 2) : scale * (FIFTH ? -16.0f : -8.0f);
        const uint32_t fifths = FIFTH ? load_as<uint32_t>(block + HEADER - 4) : 0;
        for (uint32_t i = 0; i < BLOCK; i += LANES) {
            const auto bytes = load_as<uint8_vec>(values + i % (BLOCK / 2));
            uvec q = __builtin_convertvector(i < BLOCK / 2 ? bytes & 15 : bytes >> 4, uvec);
            if constexpr (FIFTH) {
                q |= (fifths >> (lane + i) & 1) << 4;
            }
            store(to + i, __builtin_convertvector(reinterpret_cast<int_vec>(q), vec) * scale + lowest);
        }
    }
}

// nullptr: they are floats.
ggml_to_float_t to_float_of(ggml_type type) {
    switch (type) {
    case GGML_TYPE_F32:
        return nullptr;
    case GGML_TYPE_Q8_0:
        return blocks_to_floats<GGML_TYPE_Q8_0>;
    case GGML_TYPE_Q5_1:
        return blocks_to_floats<GGML_TYPE_Q5_1>;
    case GGML_TYPE_Q5_0:
        return blocks_to_floats<GGML_TYPE_Q5_0>;
    case GGML_TYPE_Q4_1:
        return blocks_to_floats<GGML_TYPE_Q4_1>;
    case GGML_TYPE_Q4_0:
        return blocks_to_floats<GGML_TYPE_Q4_0>;
    default:
        return ggml_get_type_traits(type)->to_float;
    }
}

// Rows that vectors can't read where they are, as floats: those of a chunk that any token sees.
void convert(const attend_rows & from, uint32_t head_kv, uint32_t first, uint32_t head_dim, const uint8_t * wanted, uint32_t n,
             float * to) {
    const uint32_t padded = attend_padded(head_dim);
    const ggml_to_float_t to_float = to_float_of(from.type);
    const size_t row_bytes = ggml_row_size(from.type, head_dim);
    for (uint32_t c = 0; c < n; ++c) {
        if (!wanted[c]) {
            continue;
        }
        const uint8_t * row = from.data + (first + c) * from.cell_stride + head_kv * from.head_stride;
        float * out = to + c * padded;
        prefetch(row, from.cell_stride, static_cast<uint32_t>(row_bytes));
        if (to_float) {
            to_float(row, out, head_dim);
        } else {
            __builtin_memcpy(out, row, head_dim * sizeof(float));
        }
        __builtin_memset(out + head_dim, 0, (padded - head_dim) * sizeof(float));
    }
}

void list_wanted(const attend_job & job, const attend_unit & unit, uint32_t first, uint32_t n, uint8_t * wanted) {
    __builtin_memset(wanted, 0, n);
    for (uint32_t t = unit.token_begin; t < unit.token_end; ++t) {
        const uint16_t * mask = job.mask + size_t{t} * job.n_kv + first;
        for (uint32_t c = 0; c < n; ++c) {
            wanted[c] |= mask[c] == 0;
        }
    }
}

// The queries of one token and KV head, scaled, each padded with zeros.
void scale_queries(const attend_job & job, uint32_t token, uint32_t head_kv, float * q) {
    const uint32_t group = job.n_head / job.n_head_kv;
    const uint32_t padded = attend_padded(job.head_dim);
    const float * from = job.q + (size_t{token} * job.n_head + head_kv * group) * job.head_dim;
    for (uint32_t h = 0; h < group; ++h) {
        for (uint32_t d = 0; d < padded; ++d) {
            q[h * padded + d] = d < job.head_dim ? from[h * job.head_dim + d] * job.scale : 0.0f;
        }
    }
}

// A unit over one chunk.
template <class T>
void attend_chunk(const attend_job & job, const attend_unit & unit, uint32_t first, uint32_t n, rows<T> k, rows<T> v,
                  uint32_t n_dims, float * partial, float * q) {
    const uint32_t group = job.n_head / job.n_head_kv;
    const uint32_t padded = attend_padded(job.head_dim);
    uint32_t seen[CHUNK + CELLS];
    for (uint32_t t = unit.token_begin; t < unit.token_end; ++t) {
        const uint32_t n_seen = list_seen(job.mask + size_t{t} * job.n_kv + first, n, seen);
        if (n_seen == 0) {
            continue;
        }
        for (uint32_t c = 0; c < CELLS; ++c) {
            seen[n_seen + c] = seen[0];
        }
        scale_queries(job, t, unit.head_kv, q);
        float * sum = partial + size_t{t - unit.token_begin} * group * attend_partial_floats(job.head_dim);
        attend_group(q, sum, group, padded, n_dims, k, v, seen, n_seen);
    }
}

#if LANES > 4
rows<uint16_t> in_place(const attend_rows & from, uint32_t head_kv, uint32_t first) {
    return {from.data + first * from.cell_stride + head_kv * from.head_stride, from.cell_stride};
}
#endif

void run(const attend_job & job, const attend_unit & unit, float * partial, float * scratch) {
    const uint32_t group = job.n_head / job.n_head_kv;
    const uint32_t padded = attend_padded(job.head_dim);
    const uint32_t partial_floats = attend_partial_floats(job.head_dim);
    for (uint32_t i = 0; i < (unit.token_end - unit.token_begin) * group; ++i) {
        __builtin_memset(partial + i * partial_floats, 0, partial_floats * sizeof(float));
        partial[i * partial_floats + padded] = LOWEST;
    }
    float * q = scratch;
    float * k = q + group * padded;
    float * v = k + CHUNK * padded;
    const uint32_t end = attend_range_begin(job, unit.range + 1);
    for (uint32_t first = attend_range_begin(job, unit.range); first < end; first += CHUNK) {
        const uint32_t n = min_of(CHUNK, end - first);
#if LANES > 4
        if (job.k.type == GGML_TYPE_F16 && job.v.type == GGML_TYPE_F16 && job.head_dim % LANES == 0) {
            attend_chunk<uint16_t>(job, unit, first, n, in_place(job.k, unit.head_kv, first),
                                   in_place(job.v, unit.head_kv, first), job.head_dim, partial, q);
            continue;
        }
#endif
        uint8_t wanted[CHUNK];
        list_wanted(job, unit, first, n, wanted);
        convert(job.k, unit.head_kv, first, job.head_dim, wanted, n, k);
        convert(job.v, unit.head_kv, first, job.head_dim, wanted, n, v);
        const size_t stride = padded * sizeof(float);
        attend_chunk<float>(job, unit, first, n, {reinterpret_cast<const uint8_t *>(k), stride},
                            {reinterpret_cast<const uint8_t *>(v), stride}, padded, partial, q);
    }
}

// The partial results of one query head, `stride` floats apart.
void merge_head(float * partial, size_t stride, uint32_t n_ranges, uint32_t head_dim, float * out) {
    const uint32_t padded = attend_padded(head_dim);
    float m = LOWEST;
    for (uint32_t r = 0; r < n_ranges; ++r) {
        m = max_of(partial[r * stride + padded], m);
    }
    float total = 0.0f;
    for (uint32_t r = 0; r < n_ranges; ++r) {
        const float * part = partial + r * stride;
        const float factor = part[padded + 1] == 0.0f ? 0.0f : exp_of(splat(part[padded] - m))[0];
        total += part[padded + 1] * factor;
        for (uint32_t d = 0; d < padded; d += LANES) {
            const vec scaled = load(part + d) * factor;
            store(partial + d, r == 0 ? scaled : load(partial + d) + scaled);
        }
    }
    for (uint32_t d = 0; d < head_dim; ++d) {
        out[d] = partial[d] / total;
    }
}

void merge(const attend_job & job, const attend_unit & unit, float * partial, size_t stride) {
    const uint32_t group = job.n_head / job.n_head_kv;
    for (uint32_t t = unit.token_begin; t < unit.token_end; ++t) {
        for (uint32_t h = 0; h < group; ++h) {
            float * out = job.out + (size_t{t} * job.n_head + unit.head_kv * group + h) * job.head_dim;
            merge_head(partial, stride, job.n_ranges, job.head_dim, out);
            partial += attend_partial_floats(job.head_dim);
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

} // namespace

extern const attend_kernel kernel;
const attend_kernel kernel = {KVG_ISA_NAME, LANES, run, merge, softmax};

} // namespace KVG_ISA
} // namespace kvg
