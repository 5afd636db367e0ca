// K of a chunk by dimensions, for many queries: a lane is a cell, so that no lanes of a sum are added up. Part of kernel.inl.

// columns: blocks of LANES cells, (LANES, n_dims) each. nullptr: there are rows alone
template <class T> struct keys {
    rows<T> in_rows;
    const float * columns;
};

template <uint32_t NQ> struct column_sums {
    vec of[NQ];

    void operator+=(const column_sums & others) {
        for (uint32_t h = 0; h < NQ; ++h) {
            of[h] += others.of[h];
        }
    }
};

// NQ queries with LANES cells. What a query gets has the terms and the order that dot_rows() has, to the bit.
template <uint32_t NQ> class column_block {
public:
    column_block(const float * q, uint32_t padded, const float * block, uint32_t n_dims)
        : q_(q), padded_(padded), block_(block), n_dims_(n_dims) {}

    column_sums<NQ> dots() const {
        column_sums<NQ> sum = of_dimensions<4>(0);
        sum += of_dimensions<4>(1);
        column_sums<NQ> others = of_dimensions<4>(2);
        others += of_dimensions<4>(3);
        sum += others;
        return sum;
    }

private:
    // Of dimensions `first`, `first` + STEP and so on, as fold() adds up lanes.
    template <uint32_t STEP> [[gnu::always_inline]] column_sums<NQ> of_dimensions(uint32_t first) const {
        if constexpr (STEP < LANES) {
            column_sums<NQ> sum = of_dimensions<2 * STEP>(first);
            sum += of_dimensions<2 * STEP>(first + STEP);
            return sum;
        } else {
            column_sums<NQ> sum = {};
            for (uint32_t d = first; d < n_dims_; d += STEP) {
                const vec k = load(block_ + d * LANES);
                for (uint32_t h = 0; h < NQ; ++h) {
                    sum.of[h] += q_[h * padded_ + d] * k;
                }
            }
            return sum;
        }
    }

    const float * q_;
    uint32_t padded_;
    const float * block_;
    uint32_t n_dims_;
};

// scores[h][i] = q[h] . k[seen[h][i]]
template <uint32_t NQ>
void dot_columns(const float * q, const widths & w, const float * columns, const seen_cells * const (&seen)[NQ],
                 float * scores) {
    uint32_t end = 0;
    for (uint32_t h = 0; h < NQ; ++h) {
        end = end > seen[h]->end() ? end : seen[h]->end();
    }
    for (uint32_t c = 0; c < end; c += LANES) {
        const column_sums<NQ> dots = column_block<NQ>(q, w.padded_k, columns + c * w.k, w.k).dots();
        for (uint32_t h = 0; h < NQ; ++h) {
            store(scores + h * SCORES + c, dots.of[h]);
        }
    }
    for (uint32_t h = 0; h < NQ; ++h) {
        const bool has_gaps = seen[h]->n < seen[h]->end();
        for (uint32_t i = 0; has_gaps && i < seen[h]->n; ++i) {
            scores[h * SCORES + i] = scores[h * SCORES + seen[h]->at[i]];
        }
    }
}

// As many of a chunk's K as any run of tokens needs.
struct key_columns {
    float * floats;
    uint32_t n; // cells

    // nullptr: their rows are as good, for few queries, where few cells are seen, or with shorter vectors, of which there are 16 registers.
    // n_rows: of the chunk
    template <class T>
    const float * for_run(rows<T> k, uint32_t n_dims, uint32_t n_rows, const seen_cells * seen, uint32_t n_tokens,
                          uint32_t group) {
        constexpr uint32_t MANY = 8; // queries
        uint32_t end = 0;
        uint32_t n_seen = 0;
        for (uint32_t t = 0; t < n_tokens; ++t) {
            end = end > seen[t].end() ? end : seen[t].end();
            n_seen += seen[t].n;
        }
        if (LANES < 16 || n_tokens * group < MANY || 2 * n_seen < end * n_tokens) {
            return nullptr;
        }
        for (; n < end; n += LANES) {
            turn_rows(k, n_dims, n_rows);
        }
        return floats;
    }

private:
    // The next LANES cells. Behind the last row there are zeros; lanes of cells that nobody sees may have anything, and nobody reads them.
    template <class T> void turn_rows(rows<T> k, uint32_t n_dims, uint32_t n_rows) {
        const uint32_t n_left = min_of(LANES, n_rows - n);
        for (uint32_t i = 0; i < n_left; ++i) {
            prefetch(k[n + i], k.stride, n_dims);
        }
        for (uint32_t d = 0; d < n_dims; d += LANES) {
            vec cells[LANES];
            for (uint32_t i = 0; i < LANES; ++i) {
                cells[i] = i < n_left ? load(k[n + i] + d) : vec{};
            }
            turn(cells);
            __builtin_memcpy(floats + n * n_dims + d * LANES, cells, sizeof(cells));
        }
    }
};
