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

inline void store_part(float * to, uint32_t i, uint32_t n, vec v) {
    __builtin_memcpy(to + i, &v, i + LANES <= n ? sizeof(v) : (n - i) * sizeof(float));
}

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
