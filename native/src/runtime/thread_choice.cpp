#include "runtime/thread_choice.h"

#include <algorithm>
#include <cmath>

namespace kvg {

namespace {

constexpr uint32_t TRIAL_STEPS = 3;  // of one token; one of more tokens
constexpr double BETTER = 0.97;      // of the usual time: less isn't told from chance
constexpr double FIRST_PAUSE = 0.25; // seconds after a trial, doubled with each that fails
constexpr uint32_t MAX_DOUBLED = 4;  // four seconds: three slow steps cost next to nothing then
constexpr double WEIGHT = 0.2;       // of a new step in the usual time

uint32_t bits_of(uint32_t n) { return n == 0 ? 0 : 32 - static_cast<uint32_t>(__builtin_clz(n)); }

} // namespace

int thread_choice::neighbour() const {
    const bool up = now_ < most_ && (now_ == 1 || n_failed_ % 2 == 0 || !was_busy_);
    const bool far = n_failed_ / 2 % 2 == 1;
    const int fewer = far ? now_ / 2 : now_ - 1;
    const int more = far ? now_ * 2 : now_ + 1;
    return up ? std::min(more, most_) : std::max(fewer, 1);
}

int thread_choice::next(double now) {
    // more are tried from time to time; fewer only where it may help
    const bool may_help = now_ < most_ || (was_busy_ && most_ > 1);
    if (tried_ == 0 && usual_ > 0 && may_help && now >= next_trial_) {
        tried_ = neighbour();
        n_left_ = TRIAL_STEPS;
        spent_ = 0;
    }
    return tried_ > 0 ? tried_ : now_;
}

void thread_choice::took(double now, double seconds, uint32_t n_tokens, bool is_busy) {
    was_busy_ = was_busy_ || is_busy;
    const double each = seconds / n_tokens;
    if (tried_ == 0) {
        usual_ = usual_ > 0 ? (1 - WEIGHT) * usual_ + WEIGHT * each : each;
        return;
    }
    spent_ += each;
    n_left_ = n_tokens > 1 ? 0 : n_left_ - 1;
    if (n_left_ == 0) {
        end_trial(now, spent_ / (n_tokens > 1 ? 1 : TRIAL_STEPS));
    }
}

void thread_choice::end_trial(double now, double seconds) {
    const bool is_better = seconds < BETTER * usual_;
    now_ = is_better ? tried_ : now_;
    usual_ = is_better ? seconds : usual_;
    n_failed_ = is_better ? 0 : n_failed_ + 1;
    next_trial_ = now + FIRST_PAUSE * std::exp2(std::min(n_failed_, MAX_DOUBLED));
    tried_ = 0;
    was_busy_ = false;
}

thread_choices::thread_choices(int n_threads, int n_threads_batch) {
    by_bits_.fill(thread_choice(n_threads_batch));
    by_bits_[1] = thread_choice(n_threads);
}

thread_choice & thread_choices::of(uint32_t n_tokens) { return by_bits_[bits_of(n_tokens)]; }

} // namespace kvg
