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
// The numbers from i on, of n.
inline void store_part(float * to, uint32_t i, uint32_t n, vec v) {
    __builtin_memcpy(to + i, &v, i + LANES <= n ? sizeof(v) : (n - i) * sizeof(float));
}
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

// e^x as 2^power times fraction, whose bits depend on x alone.
struct exponential {
    vec fraction; // about 0.7 to 1.42
    vec power;    // a whole number, also where x is too large for an int32_t
    vec shifted;  // the same, where it is small, as the low bits
};

// To 2 units in the last place: the fraction is a polynomial of what is left, |r| <= ln(2) / 2.
inline exponential exponential_of(vec x) {
    const vec magic = splat(12582912.0f); // 1.5 * 2^23: rounds, and leaves the integer in the low bits
    const vec shifted = x * 1.44269504f + magic;
    const vec n = shifted - magic;
    vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;       // ln(2) in two parts
    r = r > 0.5f ? splat(0.5f) : r < -0.5f ? splat(-0.5f) : r; // of millions nothing is left but a rounding
    vec p = splat(1.0f / 720) * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return {p, n, shifted};
}

// x times 2^n for a small n, which is the low bits of `shifted`.
inline vec times_power(vec x, vec shifted) {
    return reinterpret_cast<vec>(reinterpret_cast<uvec>(x) + (reinterpret_cast<uvec>(shifted) << 23));
}

// e^x for x <= 0. Below -87 it stays at e^-87.
inline vec exp_of(vec x) {
    const vec lowest = splat(-87.0f);
    const exponential e = exponential_of(x < lowest ? lowest : x);
    return x == x ? times_power(e.fraction, e.shifted) : x; // shifting would make a number of some NaNs
}

// e^x / 2^power; power: at least that of e^x. 0 below 2^-100. A greater power divides each result by a power of two exactly.
inline vec exp_below(vec x, float power) {
    const exponential e = exponential_of(x);
    const vec n = e.power - power;
    const vec found = times_power(e.fraction, n + 12582912.0f);
    return n >= -100.0f ? found : n == n ? vec{} : n;
}

// The power of two in e^x.
inline float power_of(float x) { return exponential_of(splat(x)).power[0]; }

// 2^n for a whole n <= 0; 0 below 2^-100
inline float power_of_two(float n) {
    const uint32_t bits = n >= -100.0f ? static_cast<uint32_t>(127 + static_cast<int32_t>(n)) << 23 : 0;
    float x;
    __builtin_memcpy(&x, &bits, sizeof(x));
    return x;
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
