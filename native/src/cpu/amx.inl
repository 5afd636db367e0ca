// Products of bytes by AMX: an instruction adds those of 64 numbers of 16 rows with the same 64 of 16 rows of weights to 256 sums. Included
// behind vnni.inl, whose vectors of numbers lie as these instructions take weights. All sums are integers: they are those of VNNI.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace kvg::products_vnni {

namespace {

constexpr uint32_t SQUARE = TOGETHER;       // rows that are multiplied with a tile at once
constexpr uint32_t MANY_SQUARES = 2 * MANY; // rows at a time: the second-level caches of CPUs with AMX have 2 MiB

// Neighbours of a float of this size are 1 apart. So an integer that is added to its bits is added to the float, and LARGE taken off leaves
// the integer as a float. While AMX multiplies, a CPU subtracts floats twice as fast as it converts integers.
constexpr float LARGE = 0x1.8p23f;
constexpr int32_t MOST_BESIDE_LARGE = 1 << 22;
inline __m512 from_large(__m512 v) { return _mm512_sub_ps(v, _mm512_set1_ps(LARGE)); }

// 16 rows' sums with 16 rows of weights, beside LARGE: vector i has those of row i.
struct alignas(64) square {
    __m512 of[SQUARE];
};

// As long as it lives, AMX's registers are: 0 to 3 sums, 4 and 5 N signed bytes of 16 rows each, 6 and 7 N of 16 rows of weights.
// Afterwards they have the shapes that they had before, most often none: ggml's own kernels set theirs once in each thread.
// Not by the intrinsics, of which GCC 12 doesn't know that they read and write memory.
template <uint32_t N> class amx_registers {
public:
    amx_registers() {
        layout all;
        for (uint32_t i = 0; i < 8; ++i) {
            all.row_bytes[i] = i == 4 || i == 5 ? N : 64;
            all.rows[i] = i < 6 ? SQUARE : N / 4;
        }
        asm volatile("sttilecfg %0" : "=m"(before_));
        asm volatile("ldtilecfg %0" ::"m"(all));
    }
    amx_registers(const amx_registers &) = delete;
    amx_registers & operator=(const amx_registers &) = delete;
    ~amx_registers() {
        asm volatile("tilerelease"); // nothing that the system would have to save
        if (before_.palette != 0) {
            asm volatile("ldtilecfg %0" ::"m"(before_));
        }
    }

    // Sums begin with LARGE.
    template <int TO> static void begin() {
        alignas(64) static constexpr float large[] = {LARGE, LARGE, LARGE, LARGE, LARGE, LARGE, LARGE, LARGE,
                                                      LARGE, LARGE, LARGE, LARGE, LARGE, LARGE, LARGE, LARGE};
        load<TO>(large, 0);
    }
    // 16 vectors that are `stride` bytes apart
    template <int TO> static void load(const void * from, size_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TO) : "memory");
    }
    template <int TO, int ROWS, int WEIGHTS> static void add_products() {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(ROWS), "i"(WEIGHTS));
    }
    template <int FROM> static void store(square & to) {
        asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(FROM), "r"(&to), "r"(sizeof(to.of[0])) : "memory");
    }

private:
    struct layout {
        uint8_t palette = 1;
        uint8_t unused[15] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };
    static_assert(sizeof(layout) == 64);

    layout before_;
};

} // namespace

} // namespace kvg::products_vnni
