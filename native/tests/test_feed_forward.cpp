#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/kernel.h"
#include "random_floats.h"

using namespace kvg;

namespace {

double swiglu(double gate, double up) { return gate / (1 + std::exp(-gate)) * up; }

double geglu(double gate, double up) {
    return 0.5 * gate * (1 + std::tanh(std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate))) * up;
}

double swiglu_oai(double gate, double up) {
    gate = std::fmin(gate, 7);
    up = std::fmax(-7, std::fmin(up, 7));
    return gate / (1 + std::exp(-1.702 * gate)) * (up + 1);
}

struct gate_case {
    gate_function feed_forward_kernel::* kernel;
    double (*naive)(double gate, double up);
};

const gate_case GATES[] = {{&feed_forward_kernel::swiglu, swiglu},
                           {&feed_forward_kernel::geglu, geglu},
                           {&feed_forward_kernel::swiglu_oai, swiglu_oai}};

template <class F> void for_each_kernel(F test) {
    for (const cpu_kernels * const * kernel = kernels_here(); *kernel; ++kernel) {
        CAPTURE(std::string((*kernel)->name));
        test((*kernel)->feed_forward);
    }
}

bool same(const float * a, const float * b, size_t n) { return memcmp(a, b, n * sizeof(float)) == 0; }

} // namespace

TEST_CASE("gates let through what F64 says, small numbers and large ones") {
    for_each_kernel([](const feed_forward_kernel & kernel) {
        for (const gate_case & each : GATES) {
            for (const float scale : {1e-3f, 1.0f, 5.0f, 60.0f}) {
                CAPTURE(scale);
                const std::vector<float> gate = random_floats(1000, scale, 1);
                const std::vector<float> up = random_floats(1000, scale, 2);
                std::vector<float> out(1000);
                (kernel.*each.kernel)(gate.data(), up.data(), out.data(), 1000);
                double worst = 0;
                for (size_t i = 0; i < out.size(); ++i) {
                    const double wanted = each.naive(gate[i], up[i]);
                    // beside 0 what counts is what the gate is multiplied by: 1 + tanh is 0 there
                    const double size = std::fabs(wanted) + 1e-2 * std::fabs(double{gate[i]} * (std::fabs(up[i]) + 1));
                    worst = std::fmax(worst, std::fabs(out[i] - wanted) / size);
                }
                CHECK(worst < 3e-5);
            }
        }
    });
}

TEST_CASE("what a gate lets through depends neither on a number's place nor on how many there are; it may be written over it") {
    for_each_kernel([](const feed_forward_kernel & kernel) {
        for (const gate_case & each : GATES) {
            const gate_function run = kernel.*each.kernel;
            const std::vector<float> gate = random_floats(100, 3, 3);
            const std::vector<float> up = random_floats(100, 3, 4);
            std::vector<float> all(100);
            run(gate.data(), up.data(), all.data(), 100);
            for (uint32_t begin = 0; begin < 40; ++begin) {
                for (const uint32_t n : {1u, 3u, 15u, 16u, 17u, 60u}) {
                    std::vector<float> some(gate.begin() + begin, gate.begin() + begin + n + 1);
                    const float behind = some[n];
                    run(some.data(), &up[begin], some.data(), n);
                    CHECK(same(some.data(), &all[begin], n));
                    CHECK(some[n] == behind);
                }
            }
        }
    });
}

TEST_CASE("a gate that is no number lets none through") {
    for_each_kernel([](const feed_forward_kernel & kernel) {
        for (const gate_case & each : GATES) {
            const float gate[] = {std::nanf(""), 1, 2};
            const float up[] = {1, std::nanf(""), 1};
            float out[3];
            (kernel.*each.kernel)(gate, up, out, 3);
            CHECK(std::isnan(out[0]));
            CHECK(std::isnan(out[1]));
            CHECK(std::isfinite(out[2]));
        }
    });
}

TEST_CASE("rows are added up with their weights, any columns of them") {
    for_each_kernel([](const feed_forward_kernel & kernel) {
        const uint32_t n = 203;
        const std::vector<float> y = random_floats(size_t{n} * 7, 1, 5);
        const int32_t places[] = {6, 0, 3, 5};
        const float weights[] = {0.5f, -1.25f, 3.0f, 0.1f};
        for (const float * given : {weights, static_cast<const float *>(nullptr)}) {
            const weighted_rows rows = {y.data(), n, places, given, 4};
            std::vector<float> all(n);
            kernel.sum(rows, all.data(), 0, n);
            double worst = 0;
            for (uint32_t i = 0; i < n; ++i) {
                double wanted = 0;
                for (uint32_t r = 0; r < 4; ++r) {
                    wanted += (given ? double{given[r]} : 1.0) * y[size_t{n} * static_cast<uint32_t>(places[r]) + i];
                }
                worst = std::fmax(worst, std::fabs(all[i] - wanted));
            }
            CHECK(worst < 1e-5);
            for (const uint32_t begin : {0u, 1u, 63u, 64u, 130u}) {
                for (const uint32_t end : {131u, 150u, 202u}) {
                    std::vector<float> some(n, -1.0f);
                    kernel.sum(rows, some.data(), begin, end);
                    CHECK(same(&some[begin], &all[begin], end - begin));
                    CHECK((begin == 0 || some[begin - 1] == -1.0f));
                    CHECK(some[end] == -1.0f);
                }
            }
        }
    });
}

TEST_CASE("what a router gives is F64's, and depends on no other row and no other output, to the last bit") {
    for_each_kernel([](const feed_forward_kernel & kernel) {
        for (const auto & [n_in, n_out, n_rows] : {std::array<uint32_t, 3>{16, 3, 1}, {48, 32, 2}, {512, 37, 35}}) {
            CAPTURE(n_out);
            const size_t stride = n_in + 5;
            const std::vector<float> weights = random_floats(size_t{n_in} * n_out, 1.0f, 1);
            const std::vector<float> bias = random_floats(n_out, 1.0f, 2);
            const std::vector<float> x = random_floats(stride * n_rows, 1.0f, 3);
            std::vector<float> all(size_t{n_out} * n_rows);
            kernel.route({weights.data(), bias.data(), x.data(), stride, all.data(), n_in, n_out, n_rows}, 0, n_out);
            for (uint32_t r = 0; r < n_rows; ++r) {
                for (uint32_t o = 0; o < n_out; ++o) {
                    double sum = bias[o];
                    for (uint32_t i = 0; i < n_in; ++i) {
                        sum += double{weights[size_t{o} * n_in + i]} * x[r * stride + i];
                    }
                    CHECK(all[size_t{r} * n_out + o] == doctest::Approx(sum).epsilon(1e-4).scale(std::sqrt(n_in)));
                }
                std::vector<float> alone(n_out, 1e9f);
                const route_job row = {weights.data(), bias.data(), &x[r * stride], stride, alone.data(), n_in, n_out, 1};
                kernel.route(row, 0, n_out / 3);
                CHECK(alone[n_out / 3] == 1e9f); // the outputs behind are another thread's
                kernel.route(row, n_out / 3, n_out);
                CHECK(same(alone.data(), &all[size_t{r} * n_out], n_out));
            }
        }
    });
}
