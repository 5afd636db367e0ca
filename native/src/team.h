// The threads of this process that share large operations of the CPU with the thread that computes a graph. All contexts share them.
//
// Work claims its pieces one by one, so that a slow CPU, or one that the kernel gave to somebody else, does fewer of them. A member that
// comes late isn't waited for: what it would have done is done by those that are there. Who waits spins as long as waits are short, then
// sleeps; where the kernel was seen to take CPUs away, it sleeps at once and leaves its CPU to others.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace kvg {

class team {
public:
    // This process's. A child of a fork gets another one: threads aren't there.
    static team & here();

    // Calls work(0) here, and work(i), i from 1 on and below n_threads, on members that are free; returns when all calls that began have
    // returned. work claims its pieces (pieces), and must not throw.
    template <class F> void run(int n_threads, F && work) {
        const job job = {[](void * arg, int i) { (*static_cast<std::remove_reference_t<F> *>(arg))(i); }, &work};
        share(n_threads, job);
    }
    // Wakes members that sleep: work for n_threads is about to come.
    void wake(int n_threads);
    static constexpr size_t MAX_THREADS = 512;
    // What member i, from 1 on, will probably read next: while it waits for work it fetches that into its CPU's cache. The memory may be
    // gone by then.
    void read_ahead(int i, const uint8_t * begin, size_t n_bytes);

private:
    struct job {
        void (*call)(void * work, int i);
        void * work;
        void operator()(int i) const { call(work, i); }
    };
    // A thread. `post` is 0, or the address of a job that it was given, with flags.
    struct alignas(128) member {
        std::atomic<uintptr_t> post{0};
        std::atomic<uint32_t> asleep{0};
        std::atomic<uintptr_t> ahead{0}; // what to read: an address, as the memory may be gone
        std::atomic<size_t> n_ahead{0};  // bytes of it
        int number = 0;
    };

    team() = default;
    void share(int n_threads, const job & job);
    // Members for n_threads, as many as the system lets us have. They are never fewer than before.
    size_t hire(int n_threads);
    void wake(member & member);
    void live(member & self);
    uintptr_t wait_for_job(member & self);
    static void fetch_ahead(member & self);
    void wait_for(member & member, uintptr_t taken);

    static constexpr size_t MAX_MEMBERS = MAX_THREADS - 1;
    std::mutex hiring_;
    std::unique_ptr<member> members_[MAX_MEMBERS];
    std::atomic<size_t> n_members_{0};
    std::atomic<bool> refused_{false}; // a thread, by the system: nobody asks again
};

// Where part i of n things begins that are cut into n_parts; part n_parts begins behind the last one.
inline uint32_t part_begin(uint32_t n, uint32_t i, uint32_t n_parts) {
    return static_cast<uint32_t>(uint64_t{n} * i / n_parts);
}

// Pieces of a job, each claimed once: for (uint32_t i; claimed.next(thread, i);). Each thread has a share of neighbours, which it claims from
// the first on, so that it reads memory in order. Then it claims what others have left, from the last one back.
class pieces {
public:
    // n_threads: at most team::MAX_THREADS
    pieces(uint32_t n, int n_threads);
    bool next(int thread, uint32_t & i);

private:
    struct alignas(64) share {
        std::atomic<uint64_t> left; // the first piece, and above it the one behind the last
    };
    static bool claim(share & from, bool first, uint32_t & i);

    uint32_t n_threads_;
    share shares_[team::MAX_THREADS]; // n_threads_ of them are used, the others stay as they are
};

// How many threads the operations of a graph may use while this thread computes it; 1 where nobody said.
class team_share {
public:
    explicit team_share(int n_threads) : before_(of_this_thread_) { of_this_thread_ = n_threads; }
    ~team_share() { of_this_thread_ = before_; }
    team_share(const team_share &) = delete;
    team_share & operator=(const team_share &) = delete;
    static int n_threads() { return of_this_thread_; }

private:
    static thread_local int of_this_thread_;
    int before_;
};

} // namespace kvg
