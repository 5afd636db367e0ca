// Recurrent layers. Part of kernel.inl.

// LANES channels of one run.
void convolve_lanes(const convolve_job & job, const recur_run & run, uint32_t c, const vec * taps) {
    const uint32_t n_past = job.n_taps - 1;
    const float * from = run.from ? run.from + job.runs.offset + c : nullptr;
    vec past[RECUR_TAPS];
    for (uint32_t i = 0; i < n_past; ++i) {
        past[i] = from ? load(from + size_t{i} * job.n_channels) : vec{};
    }
    const auto write = [&](float * row) {
        for (uint32_t i = 0; i < n_past; ++i) {
            store(row + job.runs.offset + size_t{i} * job.n_channels + c, past[i]);
        }
    };
    const vec bias = job.bias ? load(job.bias + c) : vec{};
    for (uint32_t t = 0; t < run.n; ++t) {
        const vec x = load(job.x.of(run.tokens[t]) + c);
        vec sum = bias;
        for (uint32_t i = 0; i < n_past; ++i) {
            sum += past[i] * taps[i];
            past[i] = i + 1 < n_past ? past[i + 1] : x;
        }
        sum += x * taps[n_past];
        store(job.out + size_t{run.tokens[t]} * job.n_channels + c, job.silu ? silu_of(sum) : sum);
        if (run.after && run.after[t]) {
            write(run.after[t]);
        }
    }
    write(run.to);
}

void convolve(const convolve_job & job, uint32_t begin, uint32_t end) {
    for (uint32_t c = begin; c < end; c += LANES) {
        vec taps[RECUR_TAPS];
        for (uint32_t lane = 0; lane < LANES; ++lane) {
            for (uint32_t i = 0; i < job.n_taps; ++i) {
                taps[i][lane] = job.taps[size_t{c + lane} * job.n_taps + i];
            }
        }
        for (uint32_t r = 0; r < job.runs.n; ++r) {
            convolve_lanes(job, job.runs.runs[r], c, taps);
        }
    }
}

// e^x for any x up to 88.
inline float exp_of_any(float x) {
    const float e = exp_of(splat(x < 0.0f ? x : -x))[0];
    return x < 0.0f ? e : 1.0f / e;
}

inline vec exp_of_any(vec x) {
    const vec e = exp_of(x < 0.0f ? x : -x);
    return x < 0.0f ? e : 1.0f / e;
}

// Four rows of a head's state, one token. from: the rows before, nullptr: zeros
void recall_token(const recall_job & job, uint32_t token, uint32_t head, uint32_t row, const float * from, float * to) {
    const uint32_t n = job.head_dim_k;
    const uint32_t head_k = recall_head_k(job, head);
    const float * q = job.q.of(token) + size_t{head_k} * n;
    const float * k = job.k.of(token) + size_t{head_k} * n;
    const float * v = job.v.of(token) + size_t{head} * job.head_dim_v + row;
    const float * decays = job.decay_by_width ? job.decay.of(token) + size_t{head} * n : nullptr;
    vec decay = splat(decays ? 0.0f : exp_of_any(job.decay.of(token)[head]));
    vec a = {}, b = {}, c = {}, d = {};
    for (uint32_t i = 0; i < n; i += LANES) {
        decay = decays ? exp_of_any(load(decays + i)) : decay;
        const vec key = load(k + i);
        const auto decayed = [&](uint32_t r) {
            const vec s = from ? load(from + size_t{r} * n + i) * decay : vec{};
            store(to + size_t{r} * n + i, s);
            return s;
        };
        a += decayed(0) * key;
        b += decayed(1) * key;
        c += decayed(2) * key;
        d += decayed(3) * key;
    }
    const vec4 recalled = job.delta ? sums(a, b, c, d) : vec4{};
    const vec4 added = (load_as<vec4>(v) - recalled) * job.beta.of(token)[head];
    a = b = c = d = vec{};
    for (uint32_t i = 0; i < n; i += LANES) {
        const vec key = load(k + i);
        const vec query = load(q + i);
        const auto updated = [&](uint32_t r) {
            float * at = to + size_t{r} * n + i;
            const vec s = load(at) + key * added[r];
            store(at, s);
            return s;
        };
        a += updated(0) * query;
        b += updated(1) * query;
        c += updated(2) * query;
        d += updated(3) * query;
    }
    vec4 out = sums(a, b, c, d) * job.scale;
    if (job.skip) {
        out += load_as<vec4>(v) * job.skip[head];
    }
    __builtin_memcpy(job.out + (size_t{token} * job.n_head + head) * job.head_dim_v + row, &out, sizeof(out));
}

// Four rows of a head's state through a run.
void recall_rows(const recall_job & job, const recur_run & run, uint32_t head, uint32_t row) {
    const size_t offset = job.runs.offset + (size_t{head} * job.head_dim_v + row) * job.head_dim_k;
    const float * from = run.from ? run.from + offset : nullptr;
    float * to = run.to + offset;
    for (uint32_t t = 0; t < run.n; ++t) {
        recall_token(job, run.tokens[t], head, row, from, to);
        from = to;
        if (run.after && run.after[t]) {
            __builtin_memcpy(run.after[t] + offset, to, size_t{RECUR_ROWS} * job.head_dim_k * sizeof(float));
        }
    }
}

void recall(const recall_job & job, uint32_t begin, uint32_t end) {
    const uint32_t n_blocks = job.head_dim_v / RECUR_ROWS;
    for (uint32_t u = begin; u < end; ++u) {
        for (uint32_t r = 0; r < job.runs.n; ++r) {
            recall_rows(job, job.runs.runs[r], u / n_blocks, u % n_blocks * RECUR_ROWS);
        }
    }
}

// The sum of squares of y(0), y(LANES), ...
template <class F> inline float sum_of_squares(uint32_t n, F y) {
    vec sum = {};
    for (uint32_t i = 0; i < n; i += LANES) {
        const vec x = y(i);
        sum += x * x;
    }
    const vec4 four = fold(sum);
    return (four[0] + four[1]) + (four[2] + four[3]);
}

void to_unit(const float * x, float * out, uint32_t n, float eps) {
    const float factor = 1.0f / __builtin_sqrtf(sum_of_squares(n, [&](uint32_t i) { return load(x + i); }) + eps);
    for (uint32_t i = 0; i < n; i += LANES) {
        store(out + i, load(x + i) * factor);
    }
}

void pass_gate(const gated_row & row) {
    const auto opened = [&](uint32_t i) {
        const vec gate = load(row.gate + i);
        return row.silu ? silu_of(gate) : sigmoid_of(gate);
    };
    const auto normed = [&](uint32_t i) { return row.gate_first ? load(row.x + i) * opened(i) : load(row.x + i); };
    const float mean = sum_of_squares(row.n, normed) / static_cast<float>(row.n);
    const float factor = 1.0f / __builtin_sqrtf(mean + row.eps);
    for (uint32_t i = 0; i < row.n; i += LANES) {
        const vec x = normed(i) * factor * load(row.weight + i);
        store(row.out + i, row.gate_first ? x : x * opened(i));
    }
}
