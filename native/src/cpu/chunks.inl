// Runs of many tokens through a state, a chunk of them at a time. Part of kernel.inl.
//
// Behind the chunk's token i a state is S a_i + sum over j <= i of w_ij d_j k_j, where S is the state before the chunk, a_i what decays
// leave of it, w_ij what they leave of what token j added, and
//     d_i = beta_i (v_i - a_i S k_i - sum over j < i of w_ij (k_j k_i) d_j)
//     o_i = a_i S q_i + sum over j <= i of w_ij (k_j q_i) d_j
// (without what the state gives for K in a recurrence that has no delta). So a state is read and written once a chunk, by products of
// matrices. States are turned for it: a panel has the floats of some rows, for each dimension of K side by side. Decays are multiplied, not
// their logarithms added: of a sum that strong decays have made large, the differences would be rounded.

constexpr uint32_t CHUNK_ROWS = LANES == 16 ? 8 : 4; // of a product at a time, as the registers allow
constexpr uint32_t PANEL_VECTORS = 2;                // of each of them

// Where its parts are in a thread's scratch. Matrices (n, n) have rows of RECUR_CHUNK.
struct chunk {
    uint32_t head_dim;       // of K
    const uint32_t * tokens; // (n)
    uint32_t n;
    uint32_t n_padded; // to whole CHUNK_ROWS: what is behind them adds nothing
    // of a head of K
    float * q;      // (head_dim, n_padded), scaled
    float * k;      // (head_dim, n_padded)
    float * dots_q; // (n, n): q_i k_j, where j <= i
    float * dots_k; // (n, n): k_i k_j
    // of a head of V
    float * asks;   // (head_dim, n_padded): a_i q_i
    float * takes;  // (head_dim, n_padded): -beta_i a_i k_i
    float * gives;  // (head_dim, n_padded): w_nj k_j
    float * kept;   // (head_dim): a_n
    float * back_q; // (n_padded, n_padded): w_ij q_i k_j, 0 where j > i
    float * back_k; // (n_padded, n_padded): -beta_i w_ij k_i k_j, 0 where j >= i
    float * beta;   // (n_padded)
    // of a panel
    float * added; // (PANEL_VECTORS * LANES, n_padded): d
    float * panel; // (PANEL_VECTORS * LANES, head_dim), on its way

    chunk(float * at, uint32_t head_dim) : head_dim(head_dim), tokens(nullptr), n(0), n_padded(0) {
        const auto take = [&](uint32_t n_floats) {
            at += n_floats;
            return at - n_floats;
        };
        q = take(RECUR_CHUNK * head_dim);
        k = take(RECUR_CHUNK * head_dim);
        asks = take(RECUR_CHUNK * head_dim);
        takes = take(RECUR_CHUNK * head_dim);
        gives = take(RECUR_CHUNK * head_dim);
        panel = take(RECUR_CHUNK * head_dim);
        kept = take(head_dim);
        dots_q = take(RECUR_CHUNK * RECUR_CHUNK);
        dots_k = take(RECUR_CHUNK * RECUR_CHUNK);
        back_q = take(RECUR_CHUNK * RECUR_CHUNK);
        back_k = take(RECUR_CHUNK * RECUR_CHUNK);
        added = take(RECUR_CHUNK * RECUR_CHUNK);
        beta = take(RECUR_CHUNK);
    }
};
static_assert(PANEL_VECTORS * LANES <= RECUR_CHUNK, "a panel's rows have room");

// What is left of nearly nothing: numbers so small that they aren't normal take long to multiply.
inline vec without_dust(vec x) { return x < 1e-30f ? vec{} : x; }
inline float without_dust(float x) { return x < 1e-30f ? 0.0f : x; }

// A product's rows, in registers.
template <uint32_t N> struct block {
    vec at[CHUNK_ROWS][N];

    // For each of its rows r: += sum over i < n of a[r * row + i * step] times b's row i.
    inline void add(const float * a, uint32_t row, uint32_t step, const float * b, uint32_t n) {
        for (uint32_t i = 0; i < n; ++i) {
            vec x[N];
            for (uint32_t v = 0; v < N; ++v) {
                x[v] = load(b + (size_t{i} * N + v) * LANES);
            }
            for (uint32_t r = 0; r < CHUNK_ROWS; ++r) {
                const vec factor = splat(a[size_t{r} * row + size_t{i} * step]);
                for (uint32_t v = 0; v < N; ++v) {
                    at[r][v] += factor * x[v];
                }
            }
        }
    }
    inline void write(float * to) const {
        for (uint32_t r = 0; r < CHUNK_ROWS; ++r) {
            for (uint32_t v = 0; v < N; ++v) {
                store(to + (r * N + v) * LANES, at[r][v]);
            }
        }
    }
};

// dots[i][j] = a_i b_j for j up to i, and some behind it. Rows of n_floats; n: whole fours
void dots_of(const float * a, const float * b, uint32_t n_floats, uint32_t n, float * dots) {
    for (uint32_t i = 0; i < n; i += 2) {
        for (uint32_t j = 0; j <= i; j += 4) {
            vec sum[2][4] = {};
            for (uint32_t f = 0; f < n_floats; f += LANES) {
                const vec x[2] = {load(a + size_t{i} * n_floats + f), load(a + size_t{i + 1} * n_floats + f)};
                for (uint32_t c = 0; c < 4; ++c) {
                    const vec y = load(b + size_t{j + c} * n_floats + f);
                    sum[0][c] += x[0] * y;
                    sum[1][c] += x[1] * y;
                }
            }
            for (uint32_t r = 0; r < 2; ++r) {
                const vec4 four = sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
                __builtin_memcpy(dots + size_t{i + r} * RECUR_CHUNK + j, &four, sizeof(four));
            }
        }
    }
}

// K and Q of the next tokens, and their products.
void begin_chunk(const recall_job & job, uint32_t head_k, const uint32_t * tokens, uint32_t n, chunk & c) {
    const uint32_t width = c.head_dim;
    c.tokens = tokens;
    c.n = n;
    c.n_padded = (n + CHUNK_ROWS - 1) / CHUNK_ROWS * CHUNK_ROWS;
    for (uint32_t i = 0; i < c.n_padded; ++i) {
        float * q = c.q + size_t{i} * width;
        float * k = c.k + size_t{i} * width;
        if (i >= n) {
            __builtin_memset(q, 0, width * sizeof(float));
            __builtin_memset(k, 0, width * sizeof(float));
            continue;
        }
        const size_t at = size_t{head_k} * width;
        __builtin_memcpy(k, job.k.of(tokens[i]) + at, width * sizeof(float));
        for (uint32_t f = 0; f < width; f += LANES) {
            store(q + f, load(job.q.of(tokens[i]) + at + f) * job.scale);
        }
    }
    if (!job.decay_by_width) {
        dots_of(c.q, c.k, width, c.n_padded, c.dots_q);
        if (job.delta) {
            dots_of(c.k, c.k, width, c.n_padded, c.dots_k);
        }
    }
}

// y = x * factor
inline void scaled(const float * x, float factor, uint32_t n, float * y) {
    for (uint32_t i = 0; i < n; i += LANES) {
        store(y + i, load(x + i) * factor);
    }
}

// What one head's decays make of K, Q and their products.
void decay_by_head(const recall_job & job, uint32_t head, const chunk & c) {
    const uint32_t width = c.head_dim;
    float reach[RECUR_CHUNK] = {}; // w_ij of the row
    float left = 1.0f;
    for (uint32_t i = 0; i < c.n_padded; ++i) {
        const float decay = i < c.n ? exp_of_any(job.decay.of(c.tokens[i])[head]) : 1.0f;
        const float minus_beta = -c.beta[i];
        left = without_dust(left * decay);
        float * back_k = c.back_k + i * RECUR_CHUNK;
        float * back_q = c.back_q + i * RECUR_CHUNK;
        for (uint32_t j = 0; j < c.n_padded; j += LANES) {
            const vec w = without_dust(load(reach + j) * decay);
            store(reach + j, w);
            store(back_k + j, w == 0.0f ? vec{} : w * load(c.dots_k + i * RECUR_CHUNK + j) * minus_beta);
            store(back_q + j, w == 0.0f ? vec{} : w * load(c.dots_q + i * RECUR_CHUNK + j));
        }
        reach[i] = 1.0f;
        back_q[i] = c.dots_q[i * RECUR_CHUNK + i];
        scaled(c.q + size_t{i} * width, left, width, c.asks + size_t{i} * width);
        scaled(c.k + size_t{i} * width, left * minus_beta, width, c.takes + size_t{i} * width);
    }
    for (uint32_t i = 0; i < c.n_padded; ++i) {
        scaled(c.k + size_t{i} * width, reach[i], width, c.gives + size_t{i} * width);
    }
    for (uint32_t f = 0; f < width; ++f) {
        c.kept[f] = left;
    }
}

// The same where each dimension of K decays by itself.
void decay_by_width(const recall_job & job, uint32_t head, const chunk & c) {
    const uint32_t width = c.head_dim;
    float * decays = c.gives; // for now
    for (uint32_t i = 0; i < c.n_padded; ++i) {
        const float * from = i < c.n ? job.decay.of(c.tokens[i]) + size_t{head} * width : nullptr;
        for (uint32_t f = 0; f < width; f += LANES) {
            store(decays + size_t{i} * width + f, from ? exp_of_any(load(from + f)) : splat(1.0f));
        }
    }
    float * w = c.kept; // for now
    for (uint32_t i = 0; i < c.n_padded; ++i) {
        float * back_k = c.back_k + i * RECUR_CHUNK;
        float * back_q = c.back_q + i * RECUR_CHUNK;
        __builtin_memset(back_k, 0, RECUR_CHUNK * sizeof(float));
        __builtin_memset(back_q, 0, RECUR_CHUNK * sizeof(float));
        for (uint32_t f = 0; f < width; ++f) {
            w[f] = 1.0f;
        }
        for (uint32_t j = i + 1; j-- > 0;) {
            vec sum_q = {}, sum_k = {};
            for (uint32_t f = 0; f < width; f += LANES) {
                const vec part = load(w + f) * load(c.k + size_t{j} * width + f);
                sum_q += part * load(c.q + size_t{i} * width + f);
                sum_k += part * load(c.k + size_t{i} * width + f);
                store(w + f, without_dust(load(w + f) * load(decays + size_t{j} * width + f)));
            }
            const vec4 both = sums(sum_q, sum_k, sum_k, sum_k);
            back_q[j] = both[0];
            back_k[j] = j < i ? both[1] * -c.beta[i] : 0.0f;
        }
    }
    for (uint32_t f = 0; f < width; f += LANES) {
        vec left = splat(1.0f);
        for (uint32_t i = 0; i < c.n_padded; ++i) {
            const size_t at = size_t{i} * width + f;
            left = without_dust(left * load(decays + at));
            store(c.asks + at, load(c.q + at) * left);
            store(c.takes + at, load(c.k + at) * left * -c.beta[i]);
        }
        store(c.kept + f, left);
        left = splat(1.0f);
        for (uint32_t i = c.n_padded; i-- > 0;) {
            const size_t at = size_t{i} * width + f;
            const vec decay = load(decays + at);
            store(c.gives + at, load(c.k + at) * left);
            left = without_dust(left * decay);
        }
    }
}

void decay_chunk(const recall_job & job, uint32_t head, const chunk & c) {
    for (uint32_t i = 0; i < c.n_padded; ++i) {
        c.beta[i] = i < c.n ? job.beta.of(c.tokens[i])[head] : 0.0f;
    }
    job.decay_by_width ? decay_by_width(job, head, c) : decay_by_head(job, head, c);
}

// A panel through a chunk. row: its first, of all heads' V
template <uint32_t N> void advance_panel(const recall_job & job, const chunk & c, uint32_t row, float * panel) {
    constexpr uint32_t WIDTH = N * LANES;
    const size_t v_width = size_t{job.n_head} * job.head_dim_v;
    const float skip = job.skip ? job.skip[row / job.head_dim_v] : 0.0f;
    for (uint32_t i = 0; i < c.n_padded; i += CHUNK_ROWS) {
        block<N> d;
        for (uint32_t r = 0; r < CHUNK_ROWS; ++r) {
            const float * values = job.v.of(c.tokens[min_of(i + r, c.n - 1)]) + row; // beta is 0 behind the last
            for (uint32_t v = 0; v < N; ++v) {
                d.at[r][v] = load(values + v * LANES) * c.beta[i + r];
            }
        }
        if (job.delta) {
            d.add(c.takes + size_t{i} * c.head_dim, c.head_dim, 1, panel, c.head_dim);
            const float * back = c.back_k + i * RECUR_CHUNK;
            d.add(back, RECUR_CHUNK, 1, c.added, i);
            for (uint32_t j = 0; j + 1 < CHUNK_ROWS; ++j) {
                for (uint32_t r = j + 1; r < CHUNK_ROWS; ++r) {
                    const float factor = back[r * RECUR_CHUNK + i + j];
                    for (uint32_t v = 0; v < N; ++v) {
                        d.at[r][v] += d.at[j][v] * factor;
                    }
                }
            }
        }
        d.write(c.added + i * WIDTH);
        block<N> o;
        for (uint32_t r = 0; r < CHUNK_ROWS; ++r) {
            const float * values = job.v.of(c.tokens[min_of(i + r, c.n - 1)]) + row;
            for (uint32_t v = 0; v < N; ++v) {
                o.at[r][v] = job.skip ? load(values + v * LANES) * skip : vec{};
            }
        }
        o.add(c.asks + size_t{i} * c.head_dim, c.head_dim, 1, panel, c.head_dim);
        o.add(c.back_q + i * RECUR_CHUNK, RECUR_CHUNK, 1, c.added, i + CHUNK_ROWS);
        for (uint32_t r = 0; r < CHUNK_ROWS; ++r) {
            if (i + r < c.n) {
                float * to = job.out + c.tokens[i + r] * v_width + row;
                for (uint32_t v = 0; v < N; ++v) {
                    store(to + v * LANES, o.at[r][v]);
                }
            }
        }
    }
    for (uint32_t f = 0; f < c.head_dim; f += CHUNK_ROWS) {
        block<N> s;
        for (uint32_t r = 0; r < CHUNK_ROWS; ++r) {
            for (uint32_t v = 0; v < N; ++v) {
                s.at[r][v] = load(panel + (f + r) * WIDTH + v * LANES) * c.kept[f + r];
            }
        }
        s.add(c.gives + f, 1, c.head_dim, c.added, c.n_padded);
        s.write(panel + f * WIDTH);
    }
}

// (n, m) becomes (m, n); both multiples of 4.
void turn(const float * from, uint32_t n, uint32_t m, float * to) {
    for (uint32_t i = 0; i < m; i += 4) {
        for (uint32_t j = 0; j < n; j += 4) {
            const auto row = [&](uint32_t r) { return load_as<vec4>(from + size_t{i + r} * n + j); };
            const vec4 a = row(0), b = row(1), c = row(2), d = row(3);
            const vec4 ab[2] = {SHUFFLE(a, b, 0, 4, 1, 5), SHUFFLE(a, b, 2, 6, 3, 7)};
            const vec4 cd[2] = {SHUFFLE(c, d, 0, 4, 1, 5), SHUFFLE(c, d, 2, 6, 3, 7)};
            for (uint32_t r = 0; r < 4; ++r) {
                const vec4 x =
                    r % 2 == 0 ? SHUFFLE(ab[r / 2], cd[r / 2], 0, 1, 4, 5) : SHUFFLE(ab[r / 2], cd[r / 2], 2, 3, 6, 7);
                __builtin_memcpy(to + size_t{j + r} * m + i, &x, sizeof(x));
            }
        }
    }
}

// Calls visit(first row, rows) for each panel of a head's rows.
template <class F> void each_panel(const recall_piece & piece, F visit) {
    for (uint32_t row = piece.row_begin; row < piece.row_end;) {
        const uint32_t n = piece.row_end - row >= PANEL_VECTORS * LANES ? PANEL_VECTORS * LANES : LANES;
        visit(row, n);
        row += n;
    }
}

// Some heads of V, and rows of them, through a run of many tokens. `to` has panels in place of rows until the run is over.
void recall_chunks(const recall_job & job, const recur_run & run, const recall_piece & piece, chunk & c) {
    const uint32_t width = job.head_dim_k;
    const auto place = [&](uint32_t head, uint32_t row) {
        return job.runs.offset + (size_t{head} * job.head_dim_v + row) * width;
    };
    const auto each = [&](auto visit) {
        for (uint32_t i = 0; i < piece.n_heads; ++i) {
            const uint32_t head = recall_head(job, piece.head_k, piece.first_head + i);
            each_panel(piece, [&](uint32_t row, uint32_t n) { visit(place(head, row), n); });
        }
    };
    each([&](size_t at, uint32_t n) {
        if (run.from) {
            turn(run.from + at, width, n, c.panel);
            __builtin_memcpy(run.to + at, c.panel, size_t{n} * width * sizeof(float));
        } else {
            __builtin_memset(run.to + at, 0, size_t{n} * width * sizeof(float));
        }
    });
    const uint32_t most = job.decay_by_width ? RECUR_CHUNK / 2 : RECUR_CHUNK;
    for (uint32_t t = 0; t < run.n; t += c.n) {
        uint32_t n = 1;
        while (n < min_of(most, run.n - t) && !(run.after && run.after[t + n - 1])) {
            ++n;
        }
        begin_chunk(job, piece.head_k, run.tokens + t, n, c);
        for (uint32_t i = 0; i < piece.n_heads; ++i) {
            const uint32_t head = recall_head(job, piece.head_k, piece.first_head + i);
            decay_chunk(job, head, c);
            each_panel(piece, [&](uint32_t row, uint32_t n_rows) {
                float * panel = run.to + place(head, row);
                const uint32_t of_all = head * job.head_dim_v + row;
                n_rows > LANES ? advance_panel<PANEL_VECTORS>(job, c, of_all, panel) : advance_panel<1>(job, c, of_all, panel);
            });
        }
        if (float * after = run.after ? run.after[t + n - 1] : nullptr) {
            each([&](size_t at, uint32_t n_rows) { turn(run.to + at, n_rows, width, after + at); });
        }
    }
    each([&](size_t at, uint32_t n) {
        turn(run.to + at, n, width, c.panel);
        __builtin_memcpy(run.to + at, c.panel, size_t{n} * width * sizeof(float));
    });
}

void recall_by_chunks(const recall_job & job, const recall_piece & piece, float * scratch) {
    chunk c(scratch, job.head_dim_k);
    for (uint32_t r = 0; r < job.runs.n; ++r) {
        const recur_run & run = job.runs.runs[r];
        if (recur_by_chunks(run)) {
            recall_chunks(job, run, piece, c);
            continue;
        }
        for (uint32_t i = 0; i < piece.n_heads; ++i) {
            const uint32_t head = recall_head(job, piece.head_k, piece.first_head + i);
            for (uint32_t row = piece.row_begin; row < piece.row_end; row += RECUR_ROWS) {
                recall_rows(job, run, head, row);
            }
        }
    }
}
