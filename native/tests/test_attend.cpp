#include <doctest/doctest.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attend_jobs.h"

using namespace kvg;

namespace {

// Every kernel within a distance of the definition.
void check_kernels(const attention_problem & p, uint32_t n_ranges, double limit) {
    CAPTURE(p.s.head_dim_k);
    CAPTURE(p.s.head_dim_v);
    CAPTURE(p.s.n_kv);
    CAPTURE(std::string(ggml_type_name(p.k.type)));
    const std::vector<double> expected = naive_attention(p);
    for_each_kernel([&](const cpu_kernels & kernel) { CHECK(worst(with_kernel(kernel, p, n_ranges), expected) < limit); });
}

constexpr ggml_type TYPES[] = {GGML_TYPE_F16,  GGML_TYPE_F32,  GGML_TYPE_BF16, GGML_TYPE_Q8_0,
                               GGML_TYPE_Q5_1, GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0};

} // namespace

TEST_CASE("every instruction set gives the definition's result, whatever the shape and type") {
    const std::pair<attention_sizes, uint32_t> shapes[] = {
        {{64, 64, 16, 4, 1, 1000}, 2}, {{64, 64, 4, 4, 3, 129}, 1},   {{128, 128, 7, 1, 2, 300}, 3},
        {{8, 8, 8, 4, 5, 40}, 1},      {{12, 12, 3, 1, 1, 256}, 2},   {{80, 80, 6, 2, 32, 70}, 1},
        {{96, 96, 5, 1, 1, 1}, 1},     {{256, 256, 2, 2, 1, 513}, 4}, {{64, 64, 32, 32, 1, 4096}, 8},
        {{64, 64, 2, 1, 1, 4097}, 8},
    };
    std::mt19937 random(1);
    for (const auto & [s, n_ranges] : shapes) {
        for (const ggml_type type : TYPES) {
            for (const double share : {1.0, 0.5, 0.02}) {
                if (fits(type, s)) {
                    check_kernels(attention_problem(s, type, share, random), n_ranges, 4e-6);
                }
            }
        }
    }
}

TEST_CASE("heads of K and V may be of any width, each its own") {
    const attention_sizes shapes[] = {
        {192, 128, 8, 2, 3, 200}, {576, 512, 16, 1, 2, 150}, {512, 512, 2, 1, 2, 140}, {64, 256, 4, 1, 3, 130},
        {100, 72, 6, 2, 3, 140},  {8, 24, 5, 1, 2, 33},      {64, 20, 2, 2, 2, 20},    {1, 3, 2, 1, 2, 20},
        {68, 575, 3, 1, 1, 129},  {24, 16, 4, 2, 3, 140},    {16, 40, 4, 2, 3, 140},   {20, 20, 4, 4, 2, 17},
        {96, 64, 4, 2, 32, 300},
    };
    std::mt19937 random(6);
    for (const attention_sizes & s : shapes) {
        for (const ggml_type type : TYPES) {
            for (const bool extras : {false, true}) {
                if (fits(type, s)) {
                    attention_problem p(s, type, 0.5, random);
                    p.soft_cap = extras ? 3.0f : 0.0f;
                    p.sinks.assign(extras ? s.n_head : 0, 1.5f);
                    check_kernels(p, s.n_kv > ATTEND_CHUNK ? 2 : 1, 4e-6);
                }
            }
        }
    }
}

TEST_CASE("rows of two types in two places: fresh ones, and from a chunk's first cell on old ones") {
    std::mt19937 random(12);
    const attention_sizes s = {64, 64, 4, 2, 20, 3 * ATTEND_CHUNK + 30};
    for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q8_0}) {
        for (const uint32_t n_fresh : {0u, ATTEND_CHUNK, 2 * ATTEND_CHUNK}) {
            attention_problem p(s, GGML_TYPE_F16, 0.5, random);
            const rows_of_type old_k(type, s.head_dim_k, s, random);
            const rows_of_type old_v(type, s.head_dim_v, s, random);
            const auto first = static_cast<std::ptrdiff_t>(size_t{n_fresh} * s.n_head_kv * s.head_dim_k);
            std::copy(old_k.values.begin() + first, old_k.values.end(), p.k.values.begin() + first);
            std::copy(old_v.values.begin() + first, old_v.values.end(), p.v.values.begin() + first);
            const std::vector<double> expected = naive_attention(p);
            for_each_kernel([&](const cpu_kernels & kernel) {
                for (const uint32_t n_ranges : {1u, 2u}) {
                    std::vector<float> out(p.out_floats());
                    attend_job job = job_of(p, out);
                    job.old_k = old_k.rows();
                    job.old_v = old_v.rows();
                    job.n_fresh = n_fresh;
                    run(kernel, job, n_ranges);
                    CHECK(worst(out, expected) < 2e-5);
                }
            });
        }
    }
}

TEST_CASE("shares: what each cell gets of the attention, whatever the shape and type") {
    const std::pair<attention_sizes, uint32_t> shapes[] = {
        {{64, 64, 16, 4, 1, 1000}, 2}, {{64, 64, 4, 4, 3, 129}, 1}, {{128, 128, 7, 1, 2, 300}, 3}, {{12, 12, 3, 1, 1, 256}, 2},
        {{80, 80, 6, 2, 32, 70}, 1},   {{96, 96, 5, 1, 1, 1}, 1},   {{192, 128, 8, 2, 3, 200}, 2},
    };
    std::mt19937 random(11);
    for (const auto & [s, n_ranges] : shapes) {
        for (const ggml_type type : TYPES) {
            for (const bool extras : {false, true}) {
                if (!fits(type, s)) {
                    continue;
                }
                attention_problem p(s, type, extras ? 0.3 : 1.0, random);
                p.soft_cap = extras ? 3.0f : 0.0f;
                p.sinks.assign(extras ? s.n_head : 0, 1.5f);
                if (extras) {
                    p.lower_by_distance();
                }
                const std::vector<double> expected = naive_shares(p);
                for_each_kernel([&, n_ranges = n_ranges](const cpu_kernels & kernel) {
                    std::vector<float> out(p.out_floats()), shares(p.s.n_kv);
                    run(kernel, job_of(p, out), n_ranges, shares.data());
                    CHECK(worst(shares, expected) < 1e-5 * s.n_head * s.n_tokens);
                    CHECK(worst(out, naive_attention(p)) < 4e-6);
                });
            }
        }
    }
}

TEST_CASE("soft cap: scores near the cap, far below and far above it") {
    std::mt19937 random(7);
    for (const float soft_cap : {50.0f, 5.0f, 0.5f}) {
        for (const float size : {1e-3f, 1.0f, 30.0f, 3000.0f}) { // of a score
            for (const uint32_t n_kv : {1u, 5u, 300u}) {
                CAPTURE(soft_cap);
                CAPTURE(size);
                attention_problem p({64, 64, 6, 2, 3, n_kv}, GGML_TYPE_F32, 0.6, random);
                p.scale *= size / 2;
                p.soft_cap = soft_cap;
                check_kernels(p, n_kv > ATTEND_CHUNK ? 2 : 1, soft_cap < 1 ? 4e-6 : 2e-5); // of 50 a rounding is 4e-6
            }
        }
    }
}

TEST_CASE("ALiBi: scores are less by distance, whatever the shape and type, behind a soft cap") {
    std::mt19937 random(20);
    const attention_sizes shapes[] = {
        {64, 64, 6, 2, 3, 300}, {128, 128, 8, 8, 20, 200}, {24, 16, 12, 1, 17, 140}, {64, 64, 9, 3, 1, 5}};
    for (const attention_sizes & s : shapes) {
        for (const ggml_type type : TYPES) {
            for (const float soft_cap : {0.0f, 5.0f}) {
                if (fits(type, s)) {
                    attention_problem p(s, type, 0.6, random);
                    p.soft_cap = soft_cap;
                    p.lower_by_distance();
                    check_kernels(p, s.n_kv > ATTEND_CHUNK ? 2 : 1, 4e-6);
                }
            }
        }
    }
}

TEST_CASE("sinks take their share: none, half, all of it, or more than a float can tell") {
    std::mt19937 random(8);
    for (const uint32_t n_ranges : {1u, 3u}) {
        attention_problem p({64, 64, 8, 2, 3, 500}, GGML_TYPE_F16, 0.5, random);
        p.sinks = {0.0f, 3.0f, -3.0f, 1e30f, -1e30f, 80.0f, -80.0f, -std::numeric_limits<float>::infinity()};
        check_kernels(p, n_ranges, 4e-6);
        p.soft_cap = 2.0f; // which sinks don't know of
        p.sinks[0] = 6.0f;
        check_kernels(p, n_ranges, 4e-6);
        p.show(0, 0);
        for_each_kernel([&](const cpu_kernels & kernel) { // of no cells there is nothing
            p.sinks.assign(8, 1.0f);
            CHECK(with_kernel(kernel, p, n_ranges) == std::vector<float>(p.out_floats(), 0.0f));
        });
        p.show(0, 500);
        p.sinks[2] = std::numeric_limits<float>::quiet_NaN(); // isn't kept secret
        for_each_kernel([&](const cpu_kernels & kernel) {
            const std::vector<float> out = with_kernel(kernel, p, n_ranges);
            CHECK(!std::isnan(out[64]));
            CHECK(std::isnan(out[2 * 64]));
        });
    }
}

TEST_CASE("windows: any first and last cell") {
    std::mt19937 random(9);
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
        attention_problem p({64, 64, 4, 2, 2, 430}, type, 1.0, random);
        for (const uint32_t n_ranges : {1u, 3u}) {
            for (const auto & [begin, end] :
                 {std::pair{0u, 16u}, std::pair{16u, 32u}, std::pair{15u, 17u}, std::pair{127u, 129u}, std::pair{256u, 430u},
                  std::pair{299u, 403u}, std::pair{416u, 430u}, std::pair{429u, 430u}, std::pair{3u, 429u},
                  std::pair{0u, 430u}}) {
                CAPTURE(begin);
                p.show(begin, end);
                check_kernels(p, n_ranges, 4e-6);
                p.mask[begin + p.s.n_kv] = HIDDEN; // the second token sees other cells than the first
                p.mask[(begin + 200) % p.s.n_kv + p.s.n_kv] = 0;
                check_kernels(p, n_ranges, 4e-6);
            }
        }
    }
}

TEST_CASE("chunks that nobody sees aren't even read") {
    std::mt19937 random(10);
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_Q4_0}) {
        attention_problem p({128, 128, 2, 1, 20, 1024}, type, 1.0, random);
        p.show(512, 640);
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const size_t n_bytes = (p.k.raw.size() + page - 1) / page * page;
        void * memory = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        REQUIRE(memory != MAP_FAILED);
        auto * rows = static_cast<uint8_t *>(memory);
        memcpy(rows, p.k.raw.data(), p.k.raw.size());
        p.v = p.k;
        const size_t begin = 512 * p.k.stride / page * page;
        const size_t end = (640 * p.k.stride + page - 1) / page * page;
        REQUIRE(mprotect(rows, begin, PROT_NONE) == 0);
        REQUIRE(mprotect(rows + end, n_bytes - end, PROT_NONE) == 0);
        const std::vector<double> expected = naive_attention(p);
        for_each_kernel([&](const cpu_kernels & kernel) {
            std::vector<float> out(p.out_floats());
            attend_job job = job_of(p, out);
            job.k.data = job.v.data = rows;
            run(kernel, job, 2);
            CHECK(worst(out, expected) < 4e-6);
        });
        munmap(memory, n_bytes);
    }
}

namespace {

// A head times a Walsh-Hadamard matrix of its size, by the definition: entries' signs are the parity of the bits that row and column
// share.
void mix(float * head, uint32_t size) {
    const std::vector<double> x(head, head + size);
    for (uint32_t row = 0; row < size; ++row) {
        double sum = 0;
        for (uint32_t column = 0; column < size; ++column) {
            uint32_t odd = 0;
            for (uint32_t bits = row & column; bits != 0; bits &= bits - 1) {
                odd ^= 1;
            }
            sum += odd ? -x[column] : x[column];
        }
        head[row] = static_cast<float>(sum / std::sqrt(static_cast<double>(size)));
    }
}

// Rotates pair i of a head by (i + 1) times the angle.
void rotate(float * head, const head_rotation & how, double angle) {
    for (uint32_t i = 0; i < how.n_pairs; ++i) {
        float & a = head[how.neox ? i : 2 * i];
        float & b = head[how.neox ? i + how.n_pairs : 2 * i + 1];
        const double x = a;
        const double y = b;
        const double cosine = std::cos(angle * (i + 1));
        const double sine = std::sin(angle * (i + 1));
        a = static_cast<float>(x * cosine - y * sine);
        b = static_cast<float>(x * sine + y * cosine);
    }
}

// K as it will be: each cell's heads, mixed by a matrix or not, rotated by the cell's angle.
void rotate_rows(attention_problem & p, const head_rotation & how, uint32_t mixed, const std::vector<double> & angles) {
    const uint32_t width = p.s.n_head_kv * p.s.head_dim_k;
    for (uint32_t c = 0; c < p.s.n_kv; ++c) {
        float * row = &p.k.values[size_t{c} * width];
        for (float * head = row; head < row + width; head += p.s.head_dim_k) {
            for (uint32_t piece = 0; mixed != 0 && piece < p.s.head_dim_k; piece += mixed) {
                mix(head + piece, mixed);
            }
            rotate(head, how, angles[c]);
            for (uint32_t piece = 0; mixed != 0 && piece < p.s.head_dim_k; piece += mixed) {
                mix(head + piece, mixed);
            }
        }
    }
}

// A problem some of whose cells wait for one of three rotations; `stretch`: cells in a row with the same rotation.
void check_waiting(attention_problem p, bool neox, uint32_t mixed, uint32_t stretch) {
    const double by[] = {0, 0.3, -2.0, 1.1}; // of rotation 0 (none), 1, 2, 3
    const head_rotation how = {p.s.head_dim_k, 20, neox};
    std::vector<uint32_t> of_cell(p.s.n_kv);
    std::vector<double> angles(p.s.n_kv);
    for (uint32_t c = 0; c < p.s.n_kv; ++c) {
        of_cell[c] = stretch == p.s.n_kv ? 3 : (c / stretch) % 4;
        angles[c] = by[of_cell[c]];
    }
    rotate_rows(p, how, mixed, angles);
    std::vector<float> tables;
    for (const double angle : {by[1], by[2], by[3]}) { // queries are rotated in the opposite direction
        for (uint32_t i = 0; i < 2 * how.n_pairs; ++i) {
            const double a = -angle * (i % how.n_pairs + 1);
            tables.push_back(static_cast<float>(i < how.n_pairs ? std::cos(a) : std::sin(a)));
        }
    }
    const std::vector<double> expected = naive_attention(p);
    const std::vector<double> shares = naive_shares(p);
    for_each_kernel([&](const cpu_kernels & kernel) {
        const attend_rotations waiting = {of_cell.data(), tables.data(), how, mixed};
        CHECK(worst(with_kernel(kernel, p, 2, waiting), expected) < 1e-5);
        std::vector<float> out(p.out_floats()), found(p.s.n_kv);
        attend_job job = job_of(p, out);
        job.waiting = waiting;
        run(kernel, job, 2, found.data());
        CHECK(worst(found, shares) < 1e-5 * p.s.n_head * p.s.n_tokens);
    });
}

} // namespace

TEST_CASE("attention to cells that wait is the same as to cells whose K was rotated") {
    const attention_sizes shapes[] = {{64, 64, 6, 2, 19, 500}, {192, 128, 4, 2, 19, 300}, {64, 96, 4, 1, 1, 300}};
    std::mt19937 random(5);
    for (const attention_sizes & s : shapes) {
        for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_F16}) {
            for (const bool neox : {false, true}) {
                for (const uint32_t mixed : {0u, 32u, 64u}) {
                    for (const uint32_t stretch : {1u, 90u, s.n_kv}) { // cells in a row with the same rotation
                        CAPTURE(s.head_dim_k);
                        CAPTURE(neox);
                        CAPTURE(mixed);
                        CAPTURE(stretch);
                        CAPTURE(std::string(ggml_type_name(type)));
                        attention_problem p(s, type, 0.7, random);
                        p.scale = 0.125f;
                        check_waiting(p, neox, mixed, stretch);
                        p.soft_cap = 4.0f;
                        p.sinks.assign(s.n_head, 2.0f);
                        check_waiting(p, neox, mixed, stretch);
                    }
                }
            }
        }
    }
}

TEST_CASE("scores far apart neither overflow nor lose the greatest") {
    std::mt19937 random(2);
    for (const float scale : {1000.0f, 1e7f, 1e12f, 1e30f}) {
        attention_problem p({64, 64, 4, 1, 1, 700}, GGML_TYPE_F16, 1.0, random);
        p.scale = scale;
        check_kernels(p, 2, 4e-6);
        for (size_t i = 0; i < p.q.size(); ++i) { // so that all scores are far below 0
            p.q[i] = i % 64 == 0 ? -1.0f : 0.0f;
        }
        for (size_t i = 0; i < p.k.values.size(); i += 64) {
            p.k.values[i] = 2.0f + static_cast<float>(i / 64 % 600);
            const ggml_fp16_t half = ggml_fp32_to_fp16(p.k.values[i]);
            memcpy(&p.k.raw[2 * i], &half, sizeof(half));
        }
        check_kernels(p, 2, 4e-6);
    }
}

TEST_CASE("what lies in hidden cells doesn't matter, and what lies in seen ones isn't kept secret") {
    std::mt19937 random(3);
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_F32}) {
        attention_problem p({64, 64, 4, 2, 1, 640}, type, 0.5, random);
        const rows_of_type sane = p.k;
        const std::vector<double> expected = naive_attention(p);
        for (uint32_t c = 0; c < p.s.n_kv; ++c) {
            if (p.mask[c] != 0) {
                memset(p.k.raw.data() + c * p.k.stride, 0xff, p.k.stride); // NaN in either type
                memset(p.v.raw.data() + c * p.v.stride, 0xff, p.v.stride);
            }
        }
        attention_problem seen = p;
        seen.show(0, p.s.n_kv);
        attention_problem only_k = seen, only_v = seen, capped = seen;
        only_k.v = only_v.k = sane;
        capped.v = sane;
        capped.soft_cap = 1.0f;
        for_each_kernel([&](const cpu_kernels & kernel) {
            CHECK(worst(with_kernel(kernel, p, 2), expected) < 4e-6);
            for (const attention_problem & broken : {seen, only_k, only_v, capped}) {
                CHECK(std::isnan(with_kernel(kernel, broken, 2)[0]));
            }
        });
    }
}

TEST_CASE("softmax: the first of the greatest, and the sum relative to it") {
    std::mt19937 random(4);
    std::normal_distribution<float> normal(0, 5);
    for (const uint32_t n : {1u, 3u, 4u, 15u, 16u, 17u, 512u, 32003u}) {
        std::vector<float> x(n);
        for (float & value : x) {
            value = normal(random);
        }
        x[n / 2] = x[n - 1] = 30.0f; // the first of equals
        if (n > 4) {
            x[1] = -INFINITY; // a token that can't be
        }
        double sum = 0;
        for (const float value : x) {
            sum += std::exp(double{value} - 30.0);
        }
        CAPTURE(n);
        for_each_kernel([&](const cpu_kernels & kernel) {
            const softmax_parts parts = kernel.attend.softmax(x.data(), n);
            CHECK(parts.best == n / 2);
            CHECK(parts.greatest == 30.0f);
            CHECK(parts.sum == doctest::Approx(sum).epsilon(1e-5));
            for (const uint32_t bits : {0x7fc00000u, 0x7fc00001u, 0x7fffffffu, 0xffffffffu, 0x7f800001u, 0x7f800000u}) {
                std::vector<float> y = x;
                memcpy(&y[n - 1], &bits, sizeof(bits)); // any NaN, and infinity
                CHECK(std::isnan(kernel.attend.softmax(y.data(), n).sum));
            }
            CHECK(std::isnan(kernel.attend.softmax(std::vector<float>(n, -INFINITY).data(), n).sum));
        });
    }
}
