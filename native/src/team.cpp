#include "team.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <thread>

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace kvg {

namespace {

using clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// Flags in the address of a job, which is a multiple of 8.
constexpr uintptr_t TAKEN = 1;   // by the member
constexpr uintptr_t AWAITED = 2; // by a thread that sleeps

constexpr int PAUSES = 16;              // between two looks at the clock, a third of a microsecond
constexpr microseconds QUIET_SPIN{500}; // for as long as anybody spins on a quiet machine: a step follows a step within this
constexpr microseconds BUSY_SPIN{5};    // where CPUs were taken away
constexpr microseconds TAKEN_AWAY{200}; // between two looks at the clock: this thread didn't run
constexpr int64_t ONE_LOST_OF = 20;     // parts of the time
constexpr std::chrono::milliseconds STAYS_BUSY{100};

std::atomic<int64_t> busy_until{0}; // of clock

int64_t count(clock::time_point t) { return t.time_since_epoch().count(); }

void futex_wait(const std::atomic<uint32_t> * word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake(const std::atomic<uint32_t> * word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }

void pause() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// How long this thread has waited for a CPU since it began, in nanoseconds; -1 where the system doesn't tell. Takes some microseconds.
int64_t waited_for_cpu() {
    const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return -1;
    }
    char text[64];
    const ssize_t n = read(file, text, sizeof(text) - 1);
    close(file);
    text[std::max<ssize_t>(n, 0)] = 0;
    long long ran = 0;
    long long waited = 0;
    return std::sscanf(text, "%lld %lld", &ran, &waited) == 2 ? waited : -1;
}

// Whether others had this thread's CPU for a part of the time since it last asked. A thread that loses its CPU does so at work, mostly.
bool lost_its_cpu(clock::time_point now) {
    static thread_local clock::time_point asked = now;
    static thread_local int64_t waited_then = 0;
    const int64_t waited = waited_for_cpu();
    if (waited < 0) {
        return false;
    }
    const bool has = now > asked && (waited - waited_then) * ONE_LOST_OF > count(now) - count(asked);
    asked = now;
    waited_then = waited;
    return has;
}

// Until `done`, or for as long as spinning is worth it: whether it is done.
template <class F> bool spin(F done) {
    const clock::time_point begin = clock::now();
    clock::time_point before = begin;
    while (true) {
        for (int i = 0; i < PAUSES; ++i) {
            if (done()) {
                return true;
            }
            pause();
        }
        const clock::time_point now = clock::now();
        if (now - before > TAKEN_AWAY) {
            busy_until = count(now + STAYS_BUSY);
        }
        before = now;
        const bool is_busy = count(now) < busy_until;
        if (now - begin > (is_busy ? BUSY_SPIN : QUIET_SPIN)) {
            if (!is_busy && lost_its_cpu(now)) {
                busy_until = count(now + STAYS_BUSY);
            }
            return done();
        }
    }
}

std::atomic<team *> current{nullptr};

} // namespace

thread_local int team_share::of_this_thread_ = 1;

// Never freed: members look at it until the process ends.
team & team::here() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { current = nullptr; });
    static_cast<void>(registered);
    team * known = current;
    while (!known) {
        std::unique_ptr<team> made(new team);
        if (current.compare_exchange_strong(known, made.get())) {
            return *made.release();
        }
    }
    return *known;
}

size_t team::hire(int n_threads) {
    const size_t wanted = std::min(static_cast<size_t>(std::max(n_threads, 1)) - 1, MAX_MEMBERS);
    if (n_members_ >= wanted || refused_) {
        return std::min(wanted, n_members_.load());
    }
    const std::lock_guard<std::mutex> lock(hiring_);
    sigset_t all;
    sigset_t before;
    sigfillset(&all); // signals are for the threads that the program knows
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        while (n_members_ < wanted && !refused_) {
            auto made = std::make_unique<member>();
            made->number = static_cast<int>(n_members_) + 1;
            std::thread([this, self = made.get()] { live(*self); }).detach();
            members_[n_members_] = std::move(made);
            ++n_members_;
        }
    } catch (const std::exception &) { // no thread, or no memory for one: those that are there do the work
        refused_ = true;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return std::min(wanted, n_members_.load());
}

void team::wake(member & member) {
    if (member.asleep && member.asleep.exchange(0)) {
        futex_wake(&member.asleep);
    }
}

void team::wake(int n_threads) {
    const size_t n = hire(n_threads);
    for (size_t i = 0; i < n; ++i) {
        wake(*members_[i]);
    }
}

void team::share(int n_threads, const job & job) {
    const size_t n = hire(n_threads);
    const auto address = reinterpret_cast<uintptr_t>(&job);
    for (size_t i = 0; i < n; ++i) {
        uintptr_t free = 0; // else it is at another context's work
        if (members_[i]->post.compare_exchange_strong(free, address)) {
            wake(*members_[i]);
        }
    }
    job(0);
    for (size_t i = 0; i < n; ++i) {
        uintptr_t given = address; // taken back, unless the member has it
        if (!members_[i]->post.compare_exchange_strong(given, 0) && (given & ~(TAKEN | AWAITED)) == address) {
            wait_for(*members_[i], given);
        }
    }
}

// The low half of `post` is what both sides sleep on.
static const std::atomic<uint32_t> * low_half(const std::atomic<uintptr_t> & post) {
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
    return reinterpret_cast<const std::atomic<uint32_t> *>(&post);
}

void team::wait_for(member & member, uintptr_t taken) {
    const auto is_done = [&] { return member.post.load() != taken; };
    if (spin(is_done)) {
        return;
    }
    if (member.post.compare_exchange_strong(taken, taken | AWAITED)) {
        while (member.post.load() == (taken | AWAITED)) {
            futex_wait(low_half(member.post), static_cast<uint32_t>(taken | AWAITED));
        }
    }
}

void team::read_ahead(int i, const uint8_t * begin, size_t n_bytes) {
    const auto at = static_cast<size_t>(i) - 1;
    if (at < n_members_) {
        members_[at]->ahead.store(reinterpret_cast<uintptr_t>(begin), std::memory_order_relaxed);
        members_[at]->n_ahead.store(n_bytes, std::memory_order_release);
    }
}

// A few lines at a time, until there is a job.
void team::fetch_ahead(member & self) {
    constexpr size_t LINE = 64;
    constexpr size_t AT_ONCE = 8 * LINE;
    const size_t n = self.n_ahead.exchange(0, std::memory_order_acquire);
    const uintptr_t begin = self.ahead.load(std::memory_order_relaxed);
    for (size_t i = 0; i + AT_ONCE <= n && self.post.load(std::memory_order_relaxed) == 0; i += AT_ONCE) {
        for (size_t line = 0; line < AT_ONCE; line += LINE) {
            __builtin_prefetch(reinterpret_cast<const void *>(begin + i + line), 0, 2);
        }
    }
}

// Returns the job, which is this member's from then on.
uintptr_t team::wait_for_job(member & self) {
    while (true) {
        fetch_ahead(self);
        const bool has_come = spin([&] { return self.post.load(std::memory_order_relaxed) != 0; });
        uintptr_t given = self.post;
        if (given != 0 && self.post.compare_exchange_strong(given, given | TAKEN)) {
            return given;
        }
        if (!has_come) {
            self.asleep = 1;
            while (self.asleep && self.post == 0) {
                futex_wait(&self.asleep, 1);
            }
            self.asleep = 0;
        }
    }
}

void team::live(member & self) {
    while (true) {
        const uintptr_t given = wait_for_job(self);
        (*reinterpret_cast<const job *>(given))(self.number);
        if (self.post.exchange(0) & AWAITED) {
            futex_wake(low_half(self.post));
        }
    }
}

pieces::pieces(uint32_t n, int n_threads) : n_threads_(static_cast<uint32_t>(n_threads)) {
    for (uint32_t i = 0; i < n_threads_; ++i) {
        const uint64_t end = part_begin(n, i + 1, n_threads_);
        shares_[i].left.store(end << 32 | part_begin(n, i, n_threads_), std::memory_order_relaxed);
    }
}

bool pieces::next(int thread, uint32_t & i) {
    for (uint32_t k = 0; k < n_threads_; ++k) {
        if (claim(shares_[(static_cast<uint32_t>(thread) + k) % n_threads_], k == 0, i)) {
            return true;
        }
    }
    return false;
}

bool pieces::claim(share & from, bool first, uint32_t & i) {
    uint64_t left = from.left.load(std::memory_order_relaxed);
    while (true) {
        const auto begin = static_cast<uint32_t>(left);
        const auto end = static_cast<uint32_t>(left >> 32);
        if (begin == end) {
            return false;
        }
        i = first ? begin : end - 1;
        const uint64_t then = first ? left + 1 : left - (uint64_t{1} << 32);
        if (from.left.compare_exchange_weak(left, then, std::memory_order_relaxed)) {
            return true;
        }
    }
}

} // namespace kvg
