// Vectors of LANES floats, and what is computed with them. Part of kernel.inl.

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

// The lower halves of two vectors, lane by lane, and the upper ones.
#if LANES == 16
#define INTERLEAVED(a, b, i)                                                                                                   \
    EACH_LANE(a, b, i, i + 16, i + 1, i + 17, i + 2, i + 18, i + 3, i + 19, i + 4, i + 20, i + 5, i + 21, i + 6, i + 22,       \
              i + 7, i + 23)
#elif LANES == 8
#define INTERLEAVED(a, b, i) EACH_LANE(a, b, i, i + 8, i + 1, i + 9, i + 2, i + 10, i + 3, i + 11)
#else
#define INTERLEAVED(a, b, i) EACH_LANE(a, b, i, i + 4, i + 1, i + 5)
#endif
#ifdef __clang__
#define EACH_LANE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define EACH_LANE(a, b, ...) __builtin_shuffle(a, b, int_vec{__VA_ARGS__})
#endif

// LANES vectors of LANES floats: lane i of vector j becomes lane j of vector i.
inline void turn(vec (&v)[LANES]) {
    for (uint32_t n = 1; n < LANES; n *= 2) {
        vec t[LANES];
#pragma GCC unroll 8
        for (uint32_t i = 0; i < LANES / 2; ++i) {
            t[2 * i] = INTERLEAVED(v[i], v[i + LANES / 2], 0);
            t[2 * i + 1] = INTERLEAVED(v[i], v[i + LANES / 2], LANES / 2);
        }
        __builtin_memcpy(v, t, sizeof(t));
    }
}

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

// The sums of four vectors' lanes, which were folded.
inline vec4 sums_of_folded(vec4 a, vec4 b, vec4 c, vec4 d) {
    const vec4 ab = SHUFFLE(a, b, 0, 4, 2, 6) + SHUFFLE(a, b, 1, 5, 3, 7);
    const vec4 cd = SHUFFLE(c, d, 0, 4, 2, 6) + SHUFFLE(c, d, 1, 5, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

// The sums of four vectors' lanes.
inline vec4 sums(vec a, vec b, vec c, vec d) { return sums_of_folded(fold(a), fold(b), fold(c), fold(d)); }

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

// tanh x to 2 units in the last place: near 0 by a polynomial (Moshier, Cephes 1989), further on by e^(-2 |x|), where nothing cancels.
inline vec tanh_of(vec x) {
    const vec size = x < 0.0f ? -x : x;
    const vec s = x * x;
    vec p = s * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * s - 5.37397155531e-2f;
    p = p * s + 1.33314422036e-1f;
    p = p * s - 3.33332819422e-1f;
    const vec near = p * s * x + x;
    const vec e = exp_of(size * -2.0f);
    const vec far = (1.0f - e) / (1.0f + e);
    return size < 0.625f ? near : (x < 0.0f ? -far : far);
}

inline vec sigmoid_of(vec x) {
    const vec e = exp_of(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

inline vec silu_of(vec x) { return x * sigmoid_of(x); }
