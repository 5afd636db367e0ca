// How many threads a step gets, on machines whose times are made up.
#include <doctest/doctest.h>

#include <cmath>
#include <functional>

#include "runtime/thread_choice.h"

using namespace kvg;

namespace {

// How a machine treats us: CPUs lost in a second, and the part of the time for which we had none.
struct treatment {
    double lost;
    double without;
};
constexpr treatment QUIET = {100, 0.02};
constexpr treatment BUSY = {200, 0.2};
constexpr treatment ON_A_DEVICE = {1, 0.9}; // the thread sleeps meanwhile

// Steps of one token until some time: seconds of one step by its number of threads.
struct machine {
    thread_choice & choice;
    double now = 0;
    uint32_t n_steps = 0;
    int last = 0;
    double lost = 0; // CPUs, and not told yet

    void run(double until, const treatment & by, const std::function<double(int)> & seconds, uint32_t n_tokens = 1) {
        for (; now < until; ++n_steps) {
            last = choice.next(now);
            const double took = seconds(last) * n_tokens;
            now += took;
            lost += took * by.lost;
            choice.took(now, n_tokens, {took, took * (1 - by.without), static_cast<int64_t>(lost)});
            lost -= std::floor(lost);
        }
    }
};

double shared(int n) { return 0.01 / n; }

} // namespace

TEST_CASE("a quiet machine: all threads, always") {
    thread_choice choice(8);
    machine m{choice};
    m.run(10, QUIET, [](int n) {
        CHECK(n == 8);
        return shared(n);
    });
}

TEST_CASE("work that only looks busy costs next to nothing") {
    thread_choice choice(2);
    machine m{choice};
    m.run(20, BUSY, shared);
    CHECK(m.n_steps > 0.98 * 20 / shared(2));
    CHECK(m.last == 2);
}

TEST_CASE("beside one busy process two threads are slower than one: one is found, and two again when it is gone") {
    thread_choice choice(2);
    machine m{choice};
    m.run(20, BUSY, [](int n) { return n == 1 ? 0.006 : 0.020; });
    CHECK(m.n_steps > 0.95 * 20 / 0.006);
    CHECK(m.last == 1);
    m.run(25, QUIET, shared); // one thread is told of nothing
    const uint32_t before = m.n_steps;
    m.run(35, QUIET, shared);
    CHECK(m.n_steps - before > 0.98 * 10 / shared(2));
}

TEST_CASE("of sixteen CPUs one is taken: fifteen threads") {
    thread_choice choice(16);
    machine m{choice};
    m.run(30, BUSY, [](int n) { return n == 16 ? 0.01 : shared(n); });
    CHECK(m.last >= 14);
    CHECK(m.last <= 16);
    CHECK(m.n_steps > 0.93 * 30 / shared(15));
}

TEST_CASE("a quarter of the threads is best: it is found, step by step") {
    thread_choice choice(16);
    machine m{choice};
    m.run(60, BUSY, [](int n) { return n <= 4 ? shared(n) : shared(4) * n / 4; });
    const uint32_t before = m.n_steps;
    m.run(120, BUSY, [](int n) { return n <= 4 ? shared(n) : shared(4) * n / 4; });
    CHECK(m.n_steps - before > 0.9 * 60 / shared(4));
}

TEST_CASE("prompts: a trial is one step") {
    thread_choice choice(2);
    machine m{choice};
    m.run(60, BUSY, [](int n) { return n == 1 ? 0.001 : 0.003; }, 512);
    CHECK(m.last == 1);
}

TEST_CASE("prompts on a quiet machine: all threads, always") {
    thread_choice choice(2);
    machine m{choice};
    m.run(
        60, QUIET,
        [](int n) {
            CHECK(n == 2);
            return 0.0007;
        },
        512);
}

TEST_CASE("steps on a device: all threads, always") {
    thread_choice choice(2);
    machine m{choice};
    m.run(60, ON_A_DEVICE, [](int n) {
        CHECK(n == 2);
        return 0.005;
    });
}

TEST_CASE("long steps that only look busy: a trial is one of eight at most") {
    thread_choice choice(2);
    machine m{choice};
    m.run(600, BUSY, [](int n) { return 0.04 / n; }, 512);
    CHECK(m.n_steps > 0.88 * 600 / (512 * 0.02));
}

TEST_CASE("the first steps are no trials: one of a long prompt would last twice as long, and there may be no more") {
    thread_choice choice(2);
    machine m{choice};
    const double step = 512 * 0.001;
    m.run(
        8 * step, BUSY,
        [](int n) {
            CHECK(n == 2);
            return 0.001;
        },
        512);
    CHECK(m.n_steps >= 8);
}

TEST_CASE("one token and several are told apart") {
    thread_choices all(1, 4);
    CHECK(all.of(1).next(0) == 1);
    CHECK(all.of(2).next(0) == 4);
    CHECK(all.of(512).next(0) == 4);
    CHECK(&all.of(2) == &all.of(3));
    CHECK(&all.of(3) != &all.of(4));
}
