#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu/kernel.h"
#include "random_floats.h"

using namespace kvg;

namespace {

constexpr float EPS = 1e-5f;

template <class F> void for_each_kernel(F test) {
    for (const cpu_kernels * const * kernel = kernels_here(); *kernel; ++kernel) {
        CAPTURE(std::string((*kernel)->name));
        test((*kernel)->norm);
    }
}

} // namespace

TEST_CASE("a norm is F64's, for rows of any length, of small numbers and of large ones") {
    for_each_kernel([](const norm_kernel & kernel) {
        for (const uint32_t n : {1u, 7u, 32u, 63u, 576u, 4099u}) {
            CAPTURE(n);
            for (const float scale : {1e-4f, 1.0f, 3e3f, 1e18f}) { // squares of the last add up to more than an F32 holds
                CAPTURE(scale);
                const std::vector<float> x = random_floats(n, scale, n);
                const std::vector<float> weight = random_floats(n, 1.0f, n + 1);
                double sum = 0;
                for (const float each : x) {
                    sum += double{each} * each;
                }
                const double wanted = 1 / std::sqrt(sum / n + double{EPS});
                const float factor = kernel.factor(x.data(), n, EPS);
                CHECK(std::fabs(factor / wanted - 1) < 3e-7);
                std::vector<float> out(n + 1, -1.0f);
                kernel.apply(x.data(), weight.data(), factor, out.data(), n);
                for (uint32_t i = 0; i < n; ++i) {
                    CHECK(out[i] == x[i] * factor * weight[i]);
                }
                CHECK(out[n] == -1.0f);
            }
        }
    });
}

TEST_CASE("a row with what is no number has no norm, wherever it is; an infinite one makes zeros of the others") {
    for_each_kernel([](const norm_kernel & kernel) {
        for (const uint32_t place : {0u, 15u, 64u, 99u}) {
            std::vector<float> x = random_floats(100, 1.0f, 5);
            x[place] = std::nanf("");
            CHECK(std::isnan(kernel.factor(x.data(), 100, EPS)));
            x[place] = std::numeric_limits<float>::infinity();
            CHECK(kernel.factor(x.data(), 100, EPS) == 0.0f);
        }
    });
}
