// Products of bytes by AMX. One instruction takes up to 64 bytes of each of 16 rows, and as many of each of 16 rows of weights, and adds their
// products to 256 sums. Included after vnni.inl: the vectors of numbers that it unpacks lie as the instruction takes weights. All sums are
// integers, so they are those of VNNI.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace kvg::products_vnni {

namespace {

constexpr uint32_t SQUARE = TOGETHER;      // rows of a square: as many as a tile has rows of weights
constexpr uint32_t MANY_BY_AMX = 2 * MANY; // rows at a time: the second-level caches of CPUs with AMX have 2 MiB

// Makes floats of integers. Two floats of this size that follow one another are 1 apart. So a sum of integers begins with the bits of LARGE,
// and is then the bits of LARGE + sum; LARGE is subtracted as a float. While AMX multiplies, a CPU subtracts floats twice as fast as it converts
// integers.
constexpr float LARGE = 0x1.8p23f;
constexpr int32_t MOST_ON_LARGE = 1 << 22; // sums are smaller
inline __m512 from_large(__m512 v) { return _mm512_sub_ps(v, _mm512_set1_ps(LARGE)); }

// Sums of 16 rows with 16 rows of weights, each with LARGE added: vector i has those of row i.
struct square {
    __m512 of[SQUARE];
};

// As long as it lives, this thread may use AMX's registers: 0 to 3 for sums, 4 and 5 for N bytes of each of 16 rows, 6 and 7 for N bytes of each
// of 16 rows of weights. All bytes have signs. Instructions are written as assembly: GCC 12 doesn't know that its intrinsics read and write
// memory.
// Afterwards they have the shapes that they had before, most often none: ggml's own kernels set theirs once in each thread.
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
    // As many vectors as the register has, `stride` bytes apart
    template <int TO> static void load(const void * from, size_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TO) : "memory");
    }
    // Adds the products of two registers to the sums of a third.
    template <int TO, int ROWS, int WEIGHTS> static void multiply() {
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
