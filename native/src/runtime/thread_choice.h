// How many threads steps of one kind are computed on: all that are allowed, unless the machine does other work and fewer were seen to be
// faster. Two threads of which one waits for a CPU are slower than one.
#pragma once

#include <array>
#include <cstdint>

namespace kvg {

// What a step took, or what was taken until now.
struct step_cost {
    double seconds = 0;
    double cpu_seconds = 0; // of the thread that called; it spins where it waits for others
    int64_t n_lost = 0;     // how often somebody else was given its CPU

    step_cost operator-(const step_cost & o) const {
        return {seconds - o.seconds, cpu_seconds - o.cpu_seconds, n_lost - o.n_lost};
    }
    step_cost & operator+=(const step_cost & o) {
        seconds += o.seconds;
        cpu_seconds += o.cpu_seconds;
        n_lost += o.n_lost;
        return *this;
    }
};

class thread_choice {
public:
    explicit thread_choice(int most = 1) : most_(most), now_(most) {}

    // Whether there is one thread, and nothing to choose.
    bool is_fixed() const { return most_ == 1; }
    // For the next step. now: seconds of any steady clock
    int next(double now);
    // That step is done.
    void took(double now, uint32_t n_tokens, const step_cost & cost);

private:
    // One more or one fewer; half or twice as many where that didn't help.
    int neighbour() const;
    // Whether somebody else wants our CPUs: a quiet machine takes them away, too, but seldom.
    bool is_busy() const;
    void end_trial(double now, double seconds, uint32_t n_tokens);

    int most_;
    int now_;               // used between trials
    int tried_ = 0;         // 0: no trial is going on
    uint32_t n_left_ = 0;   // steps of the trial
    uint32_t n_failed_ = 0; // trials since one was better
    double spent_ = 0;      // seconds a token, summed over the trial's steps
    double usual_ = 0;      // seconds a token with now_; 0: none is known
    double next_trial_ = 0; // when
    step_cost recent_;      // since the last trial, and not longer ago than a second or so
};

// One for each order of magnitude of the number of tokens.
class thread_choices {
public:
    // n_threads: for one token at a time; n_threads_batch: for more
    thread_choices(int n_threads, int n_threads_batch);
    thread_choice & of(uint32_t n_tokens);

private:
    std::array<thread_choice, 33> by_bits_;
};

} // namespace kvg
