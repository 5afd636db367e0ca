// Queries over the cells of a chunk: scores, their softmax as it grows, and sums of V. Part of kernel.inl.

// Floats of a unit's heads. A head's sums are those of V, then those of weights: in lane i of the i-th, (i + LANES)-th and so on of the
// cells that the token sees. So they don't depend on where chunks begin.
struct widths {
    uint32_t k; // of a row, in whole vectors
    uint32_t v;
    uint32_t padded_k; // from one query head to the next
    uint32_t padded_v; // of a sum of V
    explicit widths(const attend_job & job)
        : k((job.head_dim_k + LANES - 1) / LANES * LANES), v((job.head_dim_v + LANES - 1) / LANES * LANES),
          padded_k(attend_padded(job.head_dim_k)), padded_v(attend_padded(job.head_dim_v)) {}
    uint32_t partial() const { return attend_partial_floats(padded_v); } // from one head's sums to the next
    uint32_t sums() const { return padded_v + LANES; }
    // Sums are relative to a power of two, at least that of the greatest weight: so another one changes no bit of them but the exponents.
    uint32_t power() const { return padded_v + 16; }
    uint32_t total() const { return padded_v + 17; } // of weights, once all are added up
};

// Of queries' scores of a chunk, from one query to the next: with room for a vector before and behind them.
constexpr uint32_t SCORES = CHUNK + 2 * LANES;

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

// Lists the cells of a chunk from `begin` up to n that a token sees. Returns how many. Most of what a window hides costs a look at 16 cells.
uint32_t list_seen(const uint16_t * mask, uint32_t begin, uint32_t n, uint32_t * seen) {
    uint32_t n_seen = 0;
    for (uint32_t c = begin; c < n; c += 16) {
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
                n_seen += mask[i] != ATTEND_HIDDEN;
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
    constexpr uint32_t AT_ONCE = LANES == 16 || NQ <= 2 ? CELLS : CELLS / 2; // of which all sums are in registers
    for (uint32_t i = begin; i < end; i += CELLS) {
        vec4 dots[NQ][CELLS];
        for (uint32_t first = 0; first < CELLS; first += AT_ONCE) {
            const T * row[AT_ONCE];
            for (uint32_t c = 0; c < AT_ONCE; ++c) {
                row[c] = k[seen[i + first + c]];
                prefetch(row[c], k.stride, n_dims);
            }
            vec acc[NQ][AT_ONCE] = {};
            for (uint32_t d = 0; d < n_dims; d += LANES) {
                vec kd[AT_ONCE];
                for (uint32_t c = 0; c < AT_ONCE; ++c) {
                    kd[c] = load(row[c] + d);
                }
                for (uint32_t h = 0; h < NQ; ++h) {
                    const vec qd = load(q + h * padded + d);
                    for (uint32_t c = 0; c < AT_ONCE; ++c) {
                        acc[h][c] += qd * kd[c];
                    }
                }
            }
            for (uint32_t h = 0; h < NQ; ++h) {
                for (uint32_t c = 0; c < AT_ONCE; ++c) {
                    dots[h][first + c] = fold(acc[h][c]);
                }
            }
        }
        for (uint32_t h = 0; h < NQ; ++h) {
            const vec4 found = sums_of_folded(dots[h][0], dots[h][1], dots[h][2], dots[h][3]);
            __builtin_memcpy(weights + h * SCORES + i, &found, sizeof(found));
        }
    }
}

// The cells of a chunk that a token sees, in rising order, with room for CELLS more.
struct seen_cells {
    uint32_t at[CHUNK + CELLS];
    uint32_t n;
    uint32_t n_before; // cells of the range that the token has seen
    int32_t position;  // of the token, where the job has slopes

    uint32_t end() const { return at[n - 1] + 1; } // behind the last one, of which there is one
    void pad() {
        for (uint32_t c = 0; c < CELLS; ++c) {
            at[n + c] = at[0];
        }
    }
};

#include "cpu/key_columns.inl"

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
                acc[h][x] += weights[h * SCORES + i] * vx[x];
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

// ALiBi. Not inlined, so that the code around it stays as fast for models without it.
[[gnu::noinline]] void lower_by_distance(float * scores, const seen_cells & seen, const int32_t * positions, float slope) {
    for (uint32_t i = 0; i < seen.n; ++i) {
        const int32_t distance = positions[seen.at[i]] - seen.position;
        scores[i] -= slope * static_cast<float>(distance < 0 ? -distance : distance);
    }
}

// Adds up weights, each in its lane. Between seen.n and the next whole vector they are 0.
void add_weights(float * weights, const seen_cells & seen, float * totals) {
    const uint32_t offset = seen.n_before % LANES;
    vec sum = load(totals);
    if (offset == 0) { // as in a text without gaps
        for (uint32_t i = 0; i < seen.n; i += LANES) {
            sum += load(weights + i);
        }
    } else {
        store(weights - LANES, vec{});
        store(weights + seen.n, vec{});
        for (uint32_t i = 0; i < seen.n + offset; i += LANES) {
            sum += load(weights + i - offset);
        }
    }
    store(totals, sum);
}

// The scores of one head become weights, relative to a power of two to which the head's sums are brought.
void soften(float * scores, const seen_cells & seen, float * sum, const widths & w) {
    const uint32_t end = fill_up(scores, seen.n, LOWEST);
    vec most = load(scores);
    for (uint32_t i = LANES; i < end; i += LANES) {
        const vec score = load(scores + i);
        most = score > most ? score : most;
    }
    float highest = LOWEST;
    for (uint32_t x = 0; x < LANES; ++x) {
        highest = max_of(most[x], highest);
    }
    float & power = sum[w.power()];
    highest = max_of(power_of(highest), power);
    if (highest != power) {
        const float factor = power_of_two(power - highest);
        for (uint32_t d = 0; d < w.sums(); d += LANES) {
            store(sum + d, load(sum + d) * factor);
        }
        power = highest;
    }
    for (uint32_t i = 0; i < end; i += LANES) {
        store(scores + i, exp_below(load(scores + i), power));
    }
    add_weights(scores, seen, sum + w.padded_v);
}

// The scores of one head become shares of its attention, which cells get. sum: what finish() left
void share_out(float * scores, const seen_cells & seen, const float * sum, const widths & w, const attend_job & job) {
    const float power = sum[w.power()];
    const float total = sum[w.total()];
    const uint32_t end = fill_up(scores, seen.n, LOWEST);
    for (uint32_t i = 0; i < end; i += LANES) {
        store(scores + i, exp_below(load(scores + i), power) / total);
    }
    for (uint32_t i = 0; i < seen.n; ++i) {
        float & share = job.shares[seen.at[i]];
        share = job.peaks ? (share < scores[i] ? scores[i] : share) : share + scores[i];
    }
}

// The scores of NQ queries, each with the cells that its token sees.
template <uint32_t NQ, class T>
void score(const float * q, const widths & w, const keys<T> & k, const seen_cells * const (&seen)[NQ], uint32_t n_common,
           float * scores) {
    if (k.columns) {
        return dot_columns<NQ>(q, w, k.columns, seen, scores);
    }
    const uint32_t n_whole = n_common / CELLS * CELLS;
    dot_rows<NQ>(q, w.padded_k, k.in_rows, w.k, seen[0]->at, 0, n_whole, scores);
    for (uint32_t h = 0; h < NQ; ++h) {
        dot_rows<1>(q + h * w.padded_k, w.padded_k, k.in_rows, w.k, seen[h]->at, n_whole, seen[h]->n, scores + h * SCORES);
    }
}

// NQ queries: query heads of one token, or of tokens beside each other. first: place of the first one in the run, whose queries are ordered by
// tokens, then by heads. seen: of each query's token; the first n_common are the same.
// What a query gets doesn't depend on the others: each of its sums has the same terms in the same order.
template <uint32_t NQ, class T>
void attend_queries(const attend_job & job, uint32_t first, const float * q, float * sum, const keys<T> & k, rows<T> v,
                    const seen_cells * const (&seen)[NQ], uint32_t n_common) {
    const widths w(job);
    float floats[NQ * SCORES];
    float * weights = floats + LANES;
    score<NQ>(q, w, k, seen, n_common, weights);
    for (uint32_t h = 0; h < NQ; ++h) {
        float * own = weights + h * SCORES;
        if (job.soft_cap != 0.0f) {
            cap_scores(own, seen[h]->n, job.soft_cap);
        }
        if (job.slopes) {
            lower_by_distance(own, *seen[h], job.cell_positions, job.slopes[(first + h) % (job.n_head / job.n_head_kv)]);
        }
        if (job.shares) {
            share_out(own, *seen[h], sum + h * w.partial(), w, job);
        } else {
            soften(own, *seen[h], sum + h * w.partial(), w);
        }
    }
    if (job.shares) {
        return;
    }
    add_whole_rows<NQ>(sum, w, v, seen[0]->at, 0, n_common, weights);
    for (uint32_t h = 0; h < NQ; ++h) {
        if (n_common < seen[h]->n) {
            add_whole_rows<1>(sum + h * w.partial(), w, v, seen[h]->at, n_common, seen[h]->n, weights + h * SCORES);
        }
    }
}

// Tokens beside each other with all of their query heads for a KV head, HEADS at a time. q: (padded_k, group, n); sum: likewise;
// seen: of each token, none of them empty
template <class T> struct token_run {
    const attend_job & job;
    keys<T> k;
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
        attend_queries<NQ>(job, begin, q + size_t{begin} * w.padded_k, sum + size_t{begin} * w.partial(), k, v, of_each,
                           n_common);
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
