// Rows of the cache as floats and back, and what a K-shift does to them in between. Part of kernel.inl.

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

// Of all but floats.
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

// x has room for whole vectors, here and below.
void row_to_floats(ggml_type type, const void * row, float * x, uint32_t n) {
    if (type == GGML_TYPE_F32) {
        __builtin_memcpy(x, row, n * sizeof(float));
        return;
    }
    uint32_t i = 0;
#if LANES > 4
    for (; type == GGML_TYPE_F16 && i + LANES <= n; i += LANES) {
        store(x + i, load(static_cast<const uint16_t *>(row) + i));
    }
#endif
    if (i < n) { // of F16 what is less than a vector
        to_float_of(type)(static_cast<const uint8_t *>(row) + i * sizeof(uint16_t), x + i, n - i);
    }
}

void floats_to_halves(const float * x, void * row, uint32_t n) {
    auto * to = static_cast<uint16_t *>(row);
    uint32_t i = 0;
#if LANES == 16
    for (; i + LANES <= n; i += LANES) {
        const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(load(x + i)), _MM_FROUND_TO_NEAREST_INT);
        __builtin_memcpy(to + i, &halves, sizeof(halves));
    }
#elif LANES == 8
    for (; i + LANES <= n; i += LANES) {
        const __m128i halves = _mm256_cvtps_ph(reinterpret_cast<__m256>(load(x + i)), _MM_FROUND_TO_NEAREST_INT);
        __builtin_memcpy(to + i, &halves, sizeof(halves));
    }
#endif
    if (i < n) {
        ggml_fp32_to_fp16_row(x + i, to + i, n - i);
    }
}

// Q8_0: the greatest of a block is 127 steps.
void floats_to_bytes(const float * x, uint8_t * block, uint32_t n) {
    for (const float * end = x + n; x < end; x += 32, block += 34) {
        vec most = {};
        for (uint32_t i = 0; i < 32; i += LANES) {
            const vec value = load(x + i);
            const vec size = value < 0.0f ? -value : value;
            most = size > most ? size : most;
        }
        float greatest = 0.0f;
        for (uint32_t lane = 0; lane < LANES; ++lane) {
            greatest = max_of(most[lane], greatest);
        }
        const ggml_fp16_t scale = ggml_fp32_to_fp16(greatest / 127.0f);
        __builtin_memcpy(block, &scale, sizeof(scale));
        const float inverse = greatest == 0.0f ? 0.0f : 127.0f / greatest;
        const vec magic = splat(12582912.0f); // 1.5 * 2^23: rounds
        for (uint32_t i = 0; i < 32; i += LANES) {
            const vec rounded = (load(x + i) * inverse + magic) - magic;
            const int8_vec bytes = __builtin_convertvector(__builtin_convertvector(rounded, int_vec), int8_vec);
            __builtin_memcpy(block + 2 + i, &bytes, sizeof(bytes));
        }
    }
}

void floats_to_row(ggml_type type, const float * x, void * row, uint32_t n) {
    if (type == GGML_TYPE_F16) {
        floats_to_halves(x, row, n);
    } else if (type == GGML_TYPE_Q8_0) {
        floats_to_bytes(x, static_cast<uint8_t *>(row), n);
    } else {
        ggml_quantize_chunk(type, x, row, 0, 1, n, nullptr);
    }
}

// The two dimensions of a pair are neighbours, or n_pairs apart (NeoX). The compiler vectorizes both loops.
void rotate_heads(float * __restrict x, uint32_t n_heads, const head_rotation & how, const float * __restrict cosines) {
    const uint32_t n = how.n_pairs;
    const float * __restrict sines = cosines + n;
    for (uint32_t h = 0; h < n_heads; ++h) {
        float * __restrict head = x + size_t{h} * how.head_dim + how.offset;
        if (how.neox) {
            for (uint32_t i = 0; i < n; ++i) {
                const float a = head[i], b = head[i + n];
                head[i] = a * cosines[i] - b * sines[i];
                head[i + n] = a * sines[i] + b * cosines[i];
            }
        } else {
            for (uint32_t i = 0; i < n; ++i) {
                const float a = head[2 * i], b = head[2 * i + 1];
                head[2 * i] = a * cosines[i] - b * sines[i];
                head[2 * i + 1] = a * sines[i] + b * cosines[i];
            }
        }
    }
}

// The fast Walsh-Hadamard transform of each piece: sums and differences of halves, then of their halves.
void mix_heads(float * x, size_t n, uint32_t size) {
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(size));
    for (float * piece = x; piece < x + n; piece += size) {
        for (uint32_t half = size / 2; half >= 4; half /= 2) {
            for (uint32_t begin = 0; begin < size; begin += 2 * half) {
                for (uint32_t i = begin; i < begin + half; i += 4) {
                    const auto a = load_as<vec4>(piece + i), b = load_as<vec4>(piece + i + half);
                    const vec4 sum = a + b, difference = a - b;
                    __builtin_memcpy(piece + i, &sum, sizeof(sum));
                    __builtin_memcpy(piece + i + half, &difference, sizeof(difference));
                }
            }
        }
        for (uint32_t i = 0; i < size; i += 4) { // the last two steps
            vec4 v = load_as<vec4>(piece + i);
            v = SHUFFLE(v, v, 0, 1, 0, 1) + vec4{1, 1, -1, -1} * SHUFFLE(v, v, 2, 3, 2, 3);
            v = SHUFFLE(v, v, 0, 0, 2, 2) + vec4{1, -1, 1, -1} * SHUFFLE(v, v, 1, 1, 3, 3);
            v *= scale;
            __builtin_memcpy(piece + i, &v, sizeof(v));
        }
    }
}
