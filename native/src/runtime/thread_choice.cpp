#include "runtime/thread_choice.h"

#include <algorithm>
#include <cmath>

namespace kvg {

namespace {

constexpr uint32_t TRIAL_STEPS = 3;  // of one token; one of more tokens
constexpr double BETTER = 0.97;      // of the usual time: less isn't told from chance
constexpr double FIRST_PAUSE = 0.25; // seconds after a trial, doubled with each that fails
constexpr uint32_t MAX_DOUBLED = 4;  // four seconds: three slow steps cost next to nothing then
constexpr double STEPS_APART =
    8; // times of a step between trials, and before the first: one of a long prompt may cost as much as the step itself
constexpr double WEIGHT = 0.2; // of a new step in the usual time
// A machine is busy by both: CPUs lost in a second, and the part of the time for which the thread had none. A prompt on two quiet CPUs lost
// them 0 to 100 times a second, for 0 to 2% of the time; beside one busy process 150 to 600 times, for 10% or more.
constexpr double MANY_LOST = 20;
constexpr double MUCH_LOST = 0.05;
constexpr double REMEMBERED = 0.5; // seconds of computing

uint32_t bits_of(uint32_t n) { return n == 0 ? 0 : 32 - static_cast<uint32_t>(__builtin_clz(n)); }

} // namespace

int thread_choice::neighbour() const {
    const bool up = now_ < most_ && (now_ == 1 || n_failed_ % 2 == 0 || !is_busy());
    const bool far = n_failed_ / 2 % 2 == 1;
    const int fewer = far ? now_ / 2 : now_ - 1;
    const int more = far ? now_ * 2 : now_ + 1;
    return up ? std::min(more, most_) : std::max(fewer, 1);
}

bool thread_choice::is_busy() const {
    return static_cast<double>(recent_.n_lost) > MANY_LOST * recent_.seconds &&
           recent_.seconds - recent_.cpu_seconds > MUCH_LOST * recent_.seconds;
}

int thread_choice::next(double now) {
    // more are tried from time to time; fewer only where it may help
    const bool may_help = now_ < most_ || (most_ > 1 && is_busy());
    if (tried_ == 0 && usual_ > 0 && may_help && now >= next_trial_) {
        tried_ = neighbour();
        n_left_ = TRIAL_STEPS;
        spent_ = 0;
    }
    return tried_ > 0 ? tried_ : now_;
}

void thread_choice::took(double now, uint32_t n_tokens, const step_cost & cost) {
    if (recent_.seconds > REMEMBERED) {
        recent_ = {recent_.seconds / 2, recent_.cpu_seconds / 2, recent_.n_lost / 2};
    }
    recent_ += cost;
    const double each = cost.seconds / n_tokens;
    if (tried_ == 0) {
        if (usual_ == 0) { // requests that come together make a machine look busy for a step or two
            next_trial_ = now + STEPS_APART * cost.seconds;
        }
        usual_ = usual_ > 0 ? (1 - WEIGHT) * usual_ + WEIGHT * each : each;
        return;
    }
    spent_ += each;
    n_left_ = n_tokens > 1 ? 0 : n_left_ - 1;
    if (n_left_ == 0) {
        end_trial(now, spent_ / (n_tokens > 1 ? 1 : TRIAL_STEPS), n_tokens);
    }
}

void thread_choice::end_trial(double now, double seconds, uint32_t n_tokens) {
    const bool is_better = seconds < BETTER * usual_;
    now_ = is_better ? tried_ : now_;
    usual_ = is_better ? seconds : usual_;
    n_failed_ = is_better ? 0 : n_failed_ + 1;
    const double pause = FIRST_PAUSE * std::exp2(std::min(n_failed_, MAX_DOUBLED));
    next_trial_ = now + std::max(pause, is_better ? 0 : STEPS_APART * seconds * n_tokens);
    tried_ = 0;
    recent_ = {};
}

thread_choices::thread_choices(int n_threads, int n_threads_batch) {
    by_bits_.fill(thread_choice(n_threads_batch));
    by_bits_[1] = thread_choice(n_threads);
}

thread_choice & thread_choices::of(uint32_t n_tokens) { return by_bits_[bits_of(n_tokens)]; }

} // namespace kvg
