// Feed-forwards, beside their products. Part of kernel.inl.

struct swiglu_gate {
    static vec of(vec gate, vec up) { return silu_of(gate) * up; }
};

struct geglu_gate {
    static vec of(vec gate, vec up) {
        const vec inner = gate * 0.79788456f * (gate * gate * 0.044715f + 1.0f); // sqrt(2 / pi)
        return gate * 0.5f * (tanh_of(inner) + 1.0f) * up;
    }
};

struct swiglu_oai_gate {
    static vec of(vec gate, vec up) {
        const vec limit = splat(OAI_LIMIT);
        gate = gate > limit ? limit : gate; // NaN stays
        up = up > limit ? limit : up < -limit ? -limit : up;
        return gate * sigmoid_of(gate * OAI_ALPHA) * (up + 1.0f);
    }
};

template <class G> void apply_gate(const float * gate, const float * up, float * out, uint32_t n) {
    for (uint32_t i = 0; i < n; i += LANES) {
        store_part(out, i, n, G::of(load_part(gate, i, n), load_part(up, i, n)));
    }
}

void sum_rows(const weighted_rows & rows, float * out, uint32_t begin, uint32_t end) {
    constexpr uint32_t VECTORS = 4; // at a time, which don't wait for each other
    for (uint32_t i = begin; i < end; i += VECTORS * LANES) {
        const uint32_t n = min_of(VECTORS, (end - i + LANES - 1) / LANES);
        vec sum[VECTORS] = {};
        for (uint32_t r = 0; r < rows.n_rows; ++r) {
            const float * row = rows.y + static_cast<uint32_t>(rows.places[r]) * rows.stride;
            const float weight = rows.weights ? rows.weights[r] : 1.0f;
            for (uint32_t k = 0; k < n; ++k) {
                sum[k] += load_part(row, i + k * LANES, end) * weight;
            }
        }
        for (uint32_t k = 0; k < n; ++k) {
            store_part(out, i + k * LANES, end, sum[k]);
        }
    }
}

// E outputs from `first` on of R rows. Each is a sum of its own, in the order of its numbers. end: the outputs behind aren't written
template <uint32_t E, uint32_t R> inline void route_block(const route_job & job, uint32_t row, uint32_t first, uint32_t end) {
    const float * weights[E];
    for (uint32_t e = 0; e < E; ++e) {
        weights[e] = job.weights + size_t{min_of(first + e, end - 1)} * job.n_in;
    }
    const float * x = job.x + row * job.x_stride;
    vec each[R][E] = {};
    for (uint32_t i = 0; i < job.n_in; i += LANES) {
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; ++r) {
            const vec numbers = load(x + r * job.x_stride + i);
#pragma GCC unroll 8
            for (uint32_t e = 0; e < E; ++e) {
                each[r][e] += load(weights[e] + i) * numbers;
            }
        }
    }
    for (uint32_t r = 0; r < R; ++r) {
        float * out = job.out + size_t{row + r} * job.n_out;
        for (uint32_t e = 0; e < E; e += 4) {
            const vec4 four = sums(each[r][e], each[r][e + 1], each[r][e + 2], each[r][e + 3]);
            for (uint32_t k = 0; k < 4 && first + e + k < end; ++k) {
                out[first + e + k] = four[k] + (job.bias ? job.bias[first + e + k] : 0.0f);
            }
        }
    }
}

void route_rows(const route_job & job, uint32_t begin, uint32_t end) {
    constexpr uint32_t ROWS = 16; // at a time, which stay in L1 or L2
    for (uint32_t from = 0; from < job.n_rows; from += ROWS) {
        const uint32_t to = min_of(from + ROWS, job.n_rows);
        for (uint32_t first = begin; first < end; first += 4) {
            for (uint32_t row = from; row + 2 <= to; row += 2) {
                route_block<4, 2>(job, row, first, end);
            }
        }
        for (uint32_t first = begin; (to - from) % 2 != 0 && first < end; first += 8) {
            route_block<8, 1>(job, to - 1, first, end);
        }
    }
}
