#include <doctest/doctest.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/products.h"

using namespace kvg;

namespace {

// Weights whose last byte is the last that may be read.
class guarded {
public:
    explicit guarded(const std::vector<uint8_t> & bytes) {
        const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        n_bytes_ = (bytes.size() + page - 1) / page * page + page;
        void * memory = mmap(nullptr, n_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        REQUIRE(memory != MAP_FAILED);
        pages_ = static_cast<uint8_t *>(memory);
        REQUIRE(mprotect(pages_ + n_bytes_ - page, page, PROT_NONE) == 0);
        begin_ = pages_ + n_bytes_ - page - bytes.size();
        memcpy(begin_, bytes.data(), bytes.size());
    }
    guarded(const guarded &) = delete;
    guarded & operator=(const guarded &) = delete;
    ~guarded() { munmap(pages_, n_bytes_); }
    const uint8_t * begin() const { return begin_; }

private:
    uint8_t * pages_;
    uint8_t * begin_;
    size_t n_bytes_;
};

bool is_float(ggml_type type) { return type == GGML_TYPE_F16 || type == GGML_TYPE_BF16; }

// Numbers that rows of a test are multiples of. Floats have no blocks: an odd number of them leaves some over, whatever a kernel takes at once.
uint32_t block_of(ggml_type type) { return is_float(type) ? 37 : static_cast<uint32_t>(ggml_blck_size(type)); }

// The largest size of a block's weights; NaN if any is.
float largest(ggml_type type, const uint8_t * block) {
    std::vector<float> w(static_cast<size_t>(ggml_blck_size(type)));
    ggml_get_type_traits(type)->to_float(block, w.data(), ggml_blck_size(type));
    float most = 0;
    for (const float one : w) {
        most = std::fabs(one) <= most ? most : std::fabs(one); // NaN stays
    }
    return most;
}

bool is_moderate(ggml_type type, const uint8_t * block) {
    const float most = largest(type, block);
    return most > 0.02f && most < 50;
}

// 40 blocks of weights: any bytes whose weights are neither tiny nor huge. Quantizing takes seconds for some types.
std::vector<uint8_t> some_blocks(ggml_type type, std::mt19937 & random) {
    const size_t n_bytes = ggml_type_size(type);
    std::vector<uint8_t> blocks(40 * n_bytes);
    for (size_t i = 0; i < blocks.size(); i += n_bytes) {
        do {
            std::generate_n(&blocks[i], n_bytes, [&] { return static_cast<uint8_t>(random()); });
        } while (!is_moderate(type, &blocks[i]));
    }
    return blocks;
}

struct problem {
    ggml_type type;
    uint32_t n_in;
    uint32_t n_out;
    uint32_t n_rows;
    std::vector<uint8_t> weights;
    std::vector<float> x; // (n_in, n_rows)

    problem(ggml_type type, uint32_t n_in, uint32_t n_out, uint32_t n_rows)
        : type(type), n_in(n_in), n_out(n_out), n_rows(n_rows) {
        std::mt19937 random(n_in * 31 + n_out);
        std::normal_distribution<float> normal;
        const std::vector<uint8_t> blocks = some_blocks(type, random);
        const size_t n_bytes = ggml_type_size(type);
        weights.resize(ggml_row_size(type, n_in) * n_out);
        for (size_t i = 0; i < weights.size(); i += n_bytes) {
            memcpy(&weights[i], &blocks[random() % (blocks.size() / n_bytes) * n_bytes], n_bytes);
        }
        x.resize(size_t{n_in} * n_rows);
        std::generate(x.begin(), x.end(), [&] { return normal(random); });
        std::fill_n(x.begin(), 32, 0.0f);
        x[n_in - 1] = 1000.0f;
    }
};

std::vector<float> product(const product_kernel & kernel, const problem & p, const std::vector<float> & x,
                           uint32_t n_tiles_at_a_time, const float * added = nullptr) {
    const auto n_rows = static_cast<uint32_t>(x.size() / p.n_in);
    std::vector<uint8_t> rows(kernel.form.bytes(p.n_in) * n_rows);
    for (uint32_t r = 0; r < n_rows; ++r) {
        kernel.form.round(&x[size_t{r} * p.n_in], &rows[r * kernel.form.bytes(p.n_in)], p.n_in);
    }
    const guarded weights(p.weights);
    std::vector<float> out(size_t{p.n_out} * n_rows, std::nanf(""));
    const product_job job = {
        weights.begin(), ggml_row_size(p.type, p.n_in), rows.data(), out.data(), p.n_in, p.n_out, n_rows, added};
    const uint32_t n_tiles = (p.n_out + PRODUCT_TILE - 1) / PRODUCT_TILE;
    for (uint32_t begin = 0; begin < n_tiles; begin += n_tiles_at_a_time) {
        kernel.run(job, begin, std::min(begin + n_tiles_at_a_time, n_tiles));
    }
    return out;
}

// Beside floats a row stays as it is, or is rounded to BF16. Else to numbers from -127 to 127: for K-quants 256 at a time with the scale of
// the one that is farthest from 0, else 32 with an F16 scale.
std::vector<double> rounded(const product_kernel & kernel, const problem & p, uint32_t row) {
    const float * row_of_x = &p.x[size_t{row} * p.n_in];
    if (is_float(p.type)) {
        const bool to_bf16 = kernel.form.bytes(p.n_in) == 2 * p.n_in;
        std::vector<double> y(row_of_x, row_of_x + p.n_in);
        for (double & one : y) {
            one = to_bf16 ? ggml_bf16_to_fp32(ggml_fp32_to_bf16(static_cast<float>(one))) : one;
        }
        return y;
    }
    const bool of_k = ggml_blck_size(p.type) == 256;
    const uint32_t n = of_k ? 256 : 32;
    std::vector<double> y(p.n_in);
    for (uint32_t i = 0; i < p.n_in; i += n) {
        const float * x = row_of_x + i;
        const float most = *std::max_element(x, x + n, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
        const float factor = of_k ? -127 / most : 127 / std::fabs(most);
        const float scale = of_k ? 1 / factor : ggml_fp16_to_fp32(ggml_fp32_to_fp16(std::fabs(most) / 127));
        for (uint32_t j = 0; j < n; ++j) {
            y[i + j] = most != 0 ? double{std::nearbyint(x[j] * factor)} * scale : 0;
        }
    }
    return y;
}

// Where a block has the F16 that minima are multiplied by, or -1.
int place_of_minimum(ggml_type type) {
    switch (type) {
    case GGML_TYPE_Q4_1:
    case GGML_TYPE_Q5_1:
    case GGML_TYPE_Q4_K:
    case GGML_TYPE_Q5_K:
        return 2;
    case GGML_TYPE_Q2_K:
        return 82;
    default:
        return -1;
    }
}

std::vector<float> floats(const problem & p, const std::vector<uint8_t> & weights) {
    std::vector<float> w(size_t{p.n_in} * p.n_out);
    ggml_get_type_traits(p.type)->to_float(weights.data(), w.data(), static_cast<int64_t>(w.size()));
    return w;
}

// A type whose numbers have signs, and which kernels raise to numbers without: how many bytes lie before the numbers in a block, and the byte
// that is the lowest of them twice. No bytes: kernels don't raise it.
struct raised_type {
    size_t n_before;
    int lowest;
};

raised_type raised(ggml_type type) {
    switch (type) {
    case GGML_TYPE_Q4_0:
    case GGML_TYPE_Q5_0:
        return {2, 0x00};
    case GGML_TYPE_MXFP4:
        return {1, 0xff};
    default:
        return {0, 0};
    }
}

// What kernels take off each weight behind the sum.
std::vector<float> taken_off(const problem & p) {
    const raised_type type = raised(p.type);
    if (type.n_before == 0) {
        return std::vector<float>(size_t{p.n_in} * p.n_out);
    }
    std::vector<uint8_t> lowest = p.weights;
    const size_t n_bytes = ggml_type_size(p.type);
    for (size_t i = 0; i < lowest.size(); i += n_bytes) {
        memset(&lowest[i + type.n_before], type.lowest, n_bytes - type.n_before);
    }
    return floats(p, lowest);
}

// Of each weight the sizes of what it is the sum of, a number times a scale and a minimum. A weight near 0 may be the difference of two large
// ones.
std::vector<float> sizes(const problem & p, const std::vector<float> & w) {
    std::vector<uint8_t> without = p.weights;
    const int place = place_of_minimum(p.type);
    for (size_t i = 0; place >= 0 && i < without.size(); i += ggml_type_size(p.type)) {
        memset(&without[i + static_cast<size_t>(place)], 0, 2);
    }
    std::vector<float> size = floats(p, without);
    const std::vector<float> off = taken_off(p);
    for (size_t i = 0; i < w.size(); ++i) {
        size[i] = std::fabs(size[i]) + std::fabs(w[i] - size[i]) + 2 * std::fabs(off[i]);
    }
    return size;
}

// The largest error of all results, each beside what roundings of floats may add up to: three in ggml's weights; a product of scales, the
// conversion of an integer; a sum for each block or part of it, and another one where there is a minimum. Of floats 16 sums are added in the end, and sums of
// pairs take two roundings.
double worst(const product_kernel & kernel, const problem & p, const std::vector<float> & out) {
    const std::vector<float> w = floats(p, p.weights);
    const std::vector<float> size_of = sizes(p, w);
    const uint32_t of_a_sum = p.type == GGML_TYPE_NVFP4 ? 16 : block_of(p.type);
    const uint32_t n_of_blocks = p.n_in / of_a_sum * (place_of_minimum(p.type) >= 0 ? 2 : 1);
    const uint32_t n_sums = is_float(p.type) ? p.n_in / 16 + 1 : n_of_blocks;
    const double rounding = (n_sums + 5) * std::ldexp(1.0, -24);
    double most = 0;
    for (uint32_t r = 0; r < p.n_rows; ++r) {
        const std::vector<double> x = rounded(kernel, p, r);
        for (uint32_t o = 0; o < p.n_out; ++o) {
            double sum = 0;
            double size = 0;
            for (uint32_t i = 0; i < p.n_in; ++i) {
                const size_t at = size_t{o} * p.n_in + i;
                sum += w[at] * x[i];
                size += size_of[at] * std::fabs(x[i]);
            }
            const double off = std::fabs(out[size_t{r} * p.n_out + o] - sum);
            const double error = off == 0 ? 0 : off / (size * rounding); // all weights may be 0
            most = error <= most ? most : error;                         // NaN stays
        }
    }
    return most;
}

// Of each instruction set that this CPU has.
template <class F> void for_each_kernel(F test) {
    if (!product_sets_here()[0]) {
        MESSAGE("this CPU has no instruction set that products are written for");
    }
    for (const product_set * const * set = product_sets_here(); *set; ++set) {
        CAPTURE(std::string((*set)->name));
        for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
            const auto type = static_cast<ggml_type>(i);
            if (const product_kernel * kernel = (*set)->kernel_for(type)) {
                CAPTURE(std::string(ggml_type_name(type)));
                test(*kernel, type);
            }
        }
    }
}

struct shape {
    uint32_t n_blocks;
    uint32_t n_out;
    uint32_t n_rows;
};

} // namespace

TEST_CASE("a product is that of the numbers as they were rounded, in F64") {
    for_each_kernel([](const product_kernel & kernel, ggml_type type) {
        for (const shape & s :
             {shape{1, 1, 1}, shape{10, 17, 2}, shape{17, 16, 3}, shape{33, 40, 5}, shape{37, 48, 1}, shape{3, 31, 67},
              shape{3, 31, 129}, shape{3, 17, 300}, shape{9, 16, 4}, shape{5, 33, 16}, shape{5, 33, 47}}) {
            CAPTURE(s.n_blocks);
            CAPTURE(s.n_out);
            CAPTURE(s.n_rows);
            const problem p(type, s.n_blocks * block_of(type), s.n_out, s.n_rows);
            CHECK(worst(kernel, p, product(kernel, p, p.x, 2)) < 1);
        }
    });
}

TEST_CASE("sums of the largest numbers are right, too") {
    for_each_kernel([](const product_kernel & kernel, ggml_type type) {
        problem p(type, 512, 16, 18); // so many that some are multiplied together, and two alone
        for (uint32_t r = 0; r < p.n_rows; ++r) {
            std::fill_n(p.x.begin() + r * p.n_in, p.n_in, r % 2 == 0 ? 1.0f : -1.0f);
        }
        const size_t n_bytes = ggml_type_size(type);
        for (const uint8_t fill : {0x00, 0x7f, 0x80, 0xff}) {
            CAPTURE(int{fill});
            for (size_t i = 0; i < n_bytes; ++i) { // where the scale stays what it may be
                const uint8_t before = std::exchange(p.weights[i], fill);
                p.weights[i] = is_moderate(type, p.weights.data()) ? fill : before;
            }
            for (size_t i = n_bytes; i < p.weights.size(); i += n_bytes) {
                memcpy(&p.weights[i], p.weights.data(), n_bytes);
            }
            CHECK(worst(kernel, p, product(kernel, p, p.x, 1)) < 1);
            const std::vector<float> one(p.x.begin(), p.x.begin() + p.n_in);
            const std::vector<float> both = product(kernel, p, p.x, 1);
            const std::vector<float> alone = product(kernel, p, one, 1);
            CHECK(memcmp(alone.data(), both.data(), alone.size() * sizeof(float)) == 0);
        }
    });
}

TEST_CASE("what a row gives depends neither on other rows nor on how the weights are shared out, to the last bit") {
    for_each_kernel([](const product_kernel & kernel, ggml_type type) {
        const problem p(type, 1280, 40, 200);
        const std::vector<float> all = product(kernel, p, p.x, 3);
        for (const uint32_t n : {1u, 2u, 3u, 4u, 5u, 7u, 8u, 9u, 15u, 16u, 17u, 47u, 63u, 64u, 65u}) {
            for (uint32_t first = 0; first + n <= p.n_rows; first += std::max(n, 29u)) {
                CAPTURE(n);
                CAPTURE(first);
                const auto begin = p.x.begin() + static_cast<ptrdiff_t>(size_t{first} * p.n_in);
                const std::vector<float> some =
                    product(kernel, p, {begin, begin + static_cast<ptrdiff_t>(size_t{n} * p.n_in)}, 1 + n % 2);
                CHECK(memcmp(some.data(), &all[size_t{first} * p.n_out], some.size() * sizeof(float)) == 0);
            }
        }
    });
}

TEST_CASE("a row that is rounded in parts is what it is when it is rounded at once") {
    for_each_kernel([](const product_kernel & kernel, ggml_type type) {
        const problem p(type, 1280, 1, 1);
        std::vector<uint8_t> at_once(kernel.form.bytes(p.n_in));
        std::vector<uint8_t> in_parts(at_once.size());
        kernel.form.round(p.x.data(), at_once.data(), p.n_in);
        for (const auto & [begin, end] : {std::pair{0u, 768u}, {768u, 1024u}, {1024u, 1280u}}) {
            kernel.form.round_part(&p.x[begin], in_parts.data(), p.n_in, begin, end);
        }
        CHECK(in_parts == at_once);
    });
}

TEST_CASE("what is added to a product is added to its sums, as floats are") {
    for_each_kernel([](const product_kernel & kernel, ggml_type type) {
        for (const shape & s : {shape{8, 37, 1}, shape{8, 40, 3}, shape{8, 5, 2}, shape{8, 37, 200}, shape{8, 64, 1}}) {
            CAPTURE(s.n_out);
            CAPTURE(s.n_rows);
            const problem p(type, s.n_blocks * block_of(type), s.n_out, s.n_rows);
            std::vector<float> wanted = product(kernel, p, p.x, 2);
            std::mt19937 random(1);
            std::normal_distribution<float> normal;
            std::vector<float> added(wanted.size());
            for (size_t i = 0; i < added.size(); ++i) {
                added[i] = normal(random);
                wanted[i] += added[i];
            }
            const std::vector<float> sums = product(kernel, p, p.x, 2, added.data());
            CHECK(memcmp(sums.data(), wanted.data(), sums.size() * sizeof(float)) == 0);
        }
    });
}

TEST_CASE("numbers that are not finite spoil their own row alone") {
    for_each_kernel([](const product_kernel & kernel, ggml_type type) {
        problem p(type, 256, 16, 20);
        const std::vector<float> before = product(kernel, p, p.x, 1);
        p.x[256 + 5] = INFINITY;
        p.x[2 * 256 + 7] = std::nanf("");
        const std::vector<float> after = product(kernel, p, p.x, 1);
        for (const size_t row : {0u, 3u, 19u}) {
            CHECK(memcmp(&after[row * 16], &before[row * 16], 16 * sizeof(float)) == 0);
        }
        CHECK(!std::isfinite(after[16]));
        CHECK(std::isnan(after[2 * 16]));
    });
}

TEST_CASE("the least power of two of MXFP4 is no float's exponent") {
    for_each_kernel([](const product_kernel & kernel, ggml_type type) {
        if (type != GGML_TYPE_MXFP4) {
            return;
        }
        problem p(type, 64, 16, 2);
        for (size_t i = 0; i < p.weights.size(); i += ggml_type_size(p.type)) {
            p.weights[i] = static_cast<uint8_t>(i % 3 == 0 ? 0 : 1);
        }
        for (float & x : p.x) {
            x *= 1000; // results are floats of full precision again
        }
        CHECK(worst(kernel, p, product(kernel, p, p.x, 1)) < 1);
    });
}

#ifdef __x86_64__
TEST_CASE("AMX's registers have the shapes that they had before") { // other libraries set theirs once in each thread
    if (!product_sets_here()[0] || std::string(product_sets_here()[0]->name) != "amx-int8") {
        MESSAGE("this CPU has no AMX, or this process may not use it");
        return;
    }
    for_each_kernel([](const product_kernel & kernel, ggml_type type) {
        const problem p(type, is_float(type) ? 256 : 2 * block_of(type), 16, 33);
        for (const uint8_t palette : {0, 1}) {
            CAPTURE(int{palette});
            uint8_t before[64] = {palette};
            before[16] = palette * 48; // bytes of a row
            before[48] = palette * 5;  // rows
            uint8_t after[64];
            asm volatile("ldtilecfg %0" ::"m"(before));
            product(kernel, p, p.x, 1);
            asm volatile("sttilecfg %0" : "=m"(after));
            asm volatile("tilerelease");
            CHECK(memcmp(after, before, sizeof(after)) == 0);
        }
    });
}
#endif
