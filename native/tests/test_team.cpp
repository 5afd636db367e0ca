// The threads that share operations: each piece once, nobody waits for a member that doesn't come, forks, several callers.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "graph/thread_share.h"
#include "team.h"

using namespace kvg;

namespace {

// Each piece of a job is done once: how often each was.
std::vector<int> counted(uint32_t n_pieces, int n_threads) {
    std::vector<std::atomic<int>> done(n_pieces);
    pieces all(n_pieces, n_threads);
    team::here().run(n_threads, [&](int thread) {
        for (uint32_t i = 0; all.next(thread, i);) {
            ++done[i];
        }
    });
    return {done.begin(), done.end()};
}

// Members are at work until this ends.
class occupied {
public:
    explicit occupied(int n_threads)
        : caller_([this, n_threads] {
              team::here().run(n_threads, [this](int) {
                  ++n_here_;
                  while (!may_go_) {
                      std::this_thread::yield();
                  }
              });
          }) {
        while (n_here_ < n_threads) {
            std::this_thread::yield();
        }
    }
    ~occupied() {
        may_go_ = true;
        caller_.join();
    }

private:
    std::atomic<int> n_here_{0};
    std::atomic<bool> may_go_{false};
    std::thread caller_;
};

} // namespace

TEST_CASE("each piece is done once") {
    for (const int n_threads : {1, 2, 3, 5, 8}) {
        for (const uint32_t n : {0u, 1u, 2u, 7u, 1000u}) {
            CHECK(counted(n, n_threads) == std::vector<int>(n, 1));
        }
    }
}

TEST_CASE("a thread claims neighbours from the first on, then what others left from the last back") {
    pieces all(10, 2);
    const auto claimed = [&](int thread, int n) {
        std::vector<uint32_t> some;
        for (uint32_t i = 0; n > 0 && all.next(thread, i); --n) {
            some.push_back(i);
        }
        return some;
    };
    CHECK(claimed(0, 2) == std::vector<uint32_t>{0, 1});
    CHECK(claimed(1, 6) == std::vector<uint32_t>{5, 6, 7, 8, 9, 4});
    CHECK(claimed(0, 9) == std::vector<uint32_t>{2, 3});
    CHECK(claimed(1, 1).empty());
}

TEST_CASE("a hundred thousand jobs, some after a rest in which members fall asleep") {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < 100000; ++i) {
        std::atomic<uint64_t> of_job{0};
        pieces all(3, 3);
        team::here().run(3, [&](int thread) {
            for (uint32_t k = 0; all.next(thread, k);) {
                of_job += i + k;
            }
        });
        sum += of_job;
        if (i % 10000 == 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
    }
    CHECK(sum == 3 * (100000ull * 99999 / 2) + 3 * 100000);
}

TEST_CASE("threads of a job have numbers of their own, and this one is 0") {
    const std::thread::id here = std::this_thread::get_id();
    for (int round = 0; round < 200; ++round) {
        std::vector<std::atomic<int>> calls(4);
        std::atomic<bool> is_here{true};
        team::here().run(4, [&](int i) {
            ++calls.at(static_cast<size_t>(i));
            is_here = is_here && (i == 0) == (std::this_thread::get_id() == here);
        });
        CHECK(is_here);
        CHECK(calls[0] == 1);
        CHECK(std::all_of(calls.begin(), calls.end(), [](int n) { return n <= 1; }));
    }
}

TEST_CASE("nobody waits for members that are at other work") {
    const occupied busy(3);
    CHECK(counted(1000, 3) == std::vector<int>(1000, 1)); // returns while they are held
}

TEST_CASE("several callers at once, each with its own pieces") {
    std::vector<std::thread> callers;
    std::atomic<int> n_right{0};
    for (int c = 0; c < 4; ++c) {
        callers.emplace_back([&] {
            for (int i = 0; i < 2000; ++i) {
                n_right += counted(5, 3) == std::vector<int>(5, 1);
            }
        });
    }
    for (std::thread & caller : callers) {
        caller.join();
    }
    CHECK(n_right == 4 * 2000);
}

TEST_CASE("work within work") {
    std::atomic<int> n{0};
    team::here().run(3, [&](int) { n += static_cast<int>(counted(10, 3).size()); });
    CHECK(n >= 10);
    CHECK(n % 10 == 0);
}

#ifndef __SANITIZE_THREAD__ // which lets no such child start threads
TEST_CASE("a child of a fork has a team of its own, also while this one is at work") {
    const occupied busy(2);
    const pid_t child = fork();
    if (child == 0) {
        _exit(counted(1000, 3) == std::vector<int>(1000, 1) ? 0 : 1);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
}
#endif

TEST_CASE("ranges of an operation: whole units, each once, in ggml's parts or the team's pieces") {
    for (const uint32_t width : {1u, 4u, 16u}) {
        for (const uint32_t n_units : {1u, 2u, 5u, 36u, 1000u}) {
            for (const int nth : {1, 3}) {
                const team_share share(4);
                const uint32_t n = n_units * width;
                std::vector<std::atomic<int>> seen(n);
                for (int ith = 0; ith < nth; ++ith) {
                    share_out(n, width, width, ith, nth, [&](uint32_t begin, uint32_t end) {
                        for (uint32_t i = begin; i < end; ++i) {
                            seen[i] += begin % width == 0 && end % width == 0 ? 1 : 100;
                        }
                    });
                }
                CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
            }
        }
    }
}

namespace {

// Whether member 1 takes part in a job within some seconds.
bool member_comes() {
    std::atomic<bool> has_come{false};
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!has_come && std::chrono::steady_clock::now() < end) {
        team::here().run(2, [&](int i) {
            has_come = has_come || i == 1;
            for (int k = 0; k < 1000 && !has_come; ++k) {
                std::this_thread::sleep_for(std::chrono::microseconds(10));
            }
        });
    }
    return has_come;
}

} // namespace

TEST_CASE("a member that reads ahead takes the next job soon, and the memory may be gone") {
    CHECK(member_comes());
    team::here().read_ahead(1, reinterpret_cast<const uint8_t *>(64), size_t{1} << 44); // would take it many minutes
    CHECK(member_comes());                                                              // after this it reads ahead
    CHECK(member_comes());
}
