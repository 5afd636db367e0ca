#include "memory/cells.h"

#include <algorithm>
#include <array>
#include <limits>

#include "error.h"

namespace kvg {

namespace {

constexpr int64_t POS_MAX = std::numeric_limits<int32_t>::max();

struct pos_range {
    int64_t p0;
    int64_t p1;
    pos_range(int64_t first, int64_t last)
        : p0(first < 0 ? 0 : first), p1(last < 0 ? std::numeric_limits<int64_t>::max() : last) {}
    bool contains(int32_t pos) const { return pos >= p0 && pos < p1; }
};

} // namespace

cells::cells(uint32_t n_cells, uint32_t n_seq_max)
    : n_seq_max_(n_seq_max), n_words_((n_seq_max + 63) / 64), pos_(n_cells, -1), shift_(n_cells, 0), dither_(n_cells, 0),
      seq_(static_cast<size_t>(n_cells) * n_words_, 0) {}

bool cells::covers(uint32_t i, const seq_set & set) const {
    for (uint32_t w = 0; w < n_words_; ++w) {
        if ((seq_[size_t{i} * n_words_ + w] & set[w]) != set[w]) {
            return false;
        }
    }
    return true;
}

bool cells::is_shared(uint32_t i) const {
    bool seen = false;
    for (uint32_t w = 0; w < n_words_; ++w) {
        const uint64_t bits = seq_[size_t{i} * n_words_ + w];
        if (bits && (seen || (bits & (bits - 1)))) {
            return true;
        }
        seen = seen || bits;
    }
    return false;
}

seq_set cells::set(uint32_t i) const {
    const auto words = seq_.begin() + static_cast<ptrdiff_t>(i) * n_words_;
    return seq_set(words, words + n_words_);
}

uint32_t cells::check_seq(int64_t seq, const char * what) const {
    if (seq < 0 || seq >= n_seq_max_) {
        fail(KVG_INVALID_ARGUMENT, "%s %lld is out of range: this cache has sequences 0 to %u (n_seq_max = %u)", what,
             static_cast<long long>(seq), n_seq_max_ - 1, n_seq_max_);
    }
    return static_cast<uint32_t>(seq);
}

int32_t cells::seq_pos_min(int64_t seq) const {
    const uint32_t s = check_seq(seq, "sequence");
    int32_t lowest = -1;
    for (uint32_t i = 0; i < n_kv_; ++i) {
        if (has_seq(i, s) && (lowest < 0 || pos_[i] < lowest)) {
            lowest = pos_[i];
        }
    }
    return lowest;
}

int32_t cells::seq_pos_max(int64_t seq) const {
    const uint32_t s = check_seq(seq, "sequence");
    int32_t highest = -1;
    for (uint32_t i = 0; i < n_kv_; ++i) {
        if (has_seq(i, s)) {
            highest = std::max(highest, pos_[i]);
        }
    }
    return highest;
}

void cells::set_shift(uint32_t i, int32_t shift) {
    shift_version_ += shift_[i] != shift;
    n_shifted_ -= shift_[i] != 0;
    shift_[i] = shift;
    n_shifted_ += shift_[i] != 0;
}

void cells::occupy(uint32_t i, int32_t pos) {
    pos_[i] = pos;
    dither_[i] = 0;
    ++n_used_;
    n_kv_ = std::max(n_kv_, i + 1);
    touch(i);
}

void cells::put(uint32_t i, int32_t pos, const seq_set & set) {
    occupy(i, pos);
    std::copy(set.begin(), set.end(), seq_.begin() + static_cast<ptrdiff_t>(i) * n_words_);
}

void cells::drop(uint32_t i) {
    pos_[i] = -1;
    dither_[i] = 0;
    set_shift(i, 0);
    std::fill_n(seq_.begin() + static_cast<ptrdiff_t>(i) * n_words_, n_words_, 0);
    --n_used_;
    while (n_kv_ > 0 && is_empty(n_kv_ - 1)) {
        --n_kv_;
    }
}

void cells::move(const std::vector<cell_move> & moves) {
    struct content {
        int32_t pos;
        int32_t shift;
        uint8_t dither;
        seq_set set;
    };
    std::vector<content> taken;
    taken.reserve(moves.size());
    for (const cell_move & m : moves) {
        taken.push_back({pos_[m.src], shift_[m.src], dither_[m.src], set(m.src)});
    }
    // nothing is allocated from here on
    for (const cell_move & m : moves) {
        drop(m.src);
    }
    for (size_t i = 0; i < moves.size(); ++i) {
        put(moves[i].dst, taken[i].pos, taken[i].set);
        set_shift(moves[i].dst, taken[i].shift);
        dither_[moves[i].dst] = taken[i].dither;
    }
}

void cells::fork(uint32_t src, uint32_t dst, uint32_t seq) noexcept {
    occupy(dst, pos_[src]);
    seq_[size_t{dst} * n_words_ + seq / 64] = uint64_t{1} << (seq % 64); // an empty cell's words are 0
    set_shift(dst, shift_[src]);
    dither_[dst] = dither_[src];
    remove_seq(src, seq);
}

void cells::clear() {
    std::fill(pos_.begin(), pos_.end(), -1);
    std::fill(shift_.begin(), shift_.end(), 0);
    std::fill(dither_.begin(), dither_.end(), 0);
    std::fill(seq_.begin(), seq_.end(), 0);
    n_used_ = n_kv_ = n_touched_ = n_shifted_ = 0;
    ++shift_version_;
}

// After the one that most carry: it goes through all of them, whatever a few others bring along.
uint8_t cells::next_dither(const std::vector<uint32_t> & rotated) const {
    std::array<uint32_t, 256> n_waiting = {};
    for (const uint32_t i : rotated) {
        ++n_waiting[dither_[i]];
    }
    n_waiting[0] = n_waiting[1] = 0; // neither is one
    const auto after = [](size_t dither) { return dither == 255 ? size_t{2} : std::max<size_t>(dither + 1, 2); };
    const auto most = static_cast<size_t>(std::max_element(n_waiting.begin(), n_waiting.end()) - n_waiting.begin());
    size_t next = after(most);
    while (n_waiting[next] != 0 && next != most) {
        next = after(next);
    }
    return static_cast<uint8_t>(next == most ? after(most) : next);
}

void cells::clear_shifts(const std::vector<uint32_t> & rotated) {
    const uint8_t next = next_dither(rotated);
    for (const uint32_t i : rotated) {
        dither_[i] = dither_after(dither_[i], next);
        set_shift(i, 0);
    }
}

void cells::remove_seq(uint32_t i, uint32_t seq) {
    seq_[size_t{i} * n_words_ + seq / 64] &= ~(uint64_t{1} << (seq % 64));
    const auto words = seq_.begin() + static_cast<ptrdiff_t>(i) * n_words_;
    if (std::all_of(words, words + n_words_, [](uint64_t w) { return w == 0; })) {
        drop(i);
    }
}

void cells::seq_rm(int64_t seq, int64_t p0, int64_t p1) {
    const bool every = seq < 0;
    const uint32_t s = every ? 0 : check_seq(seq, "sequence");
    const pos_range range(p0, p1);
    for (uint32_t i = 0, end = n_kv_; i < end; ++i) {
        if (is_empty(i) || !range.contains(pos_[i])) {
            continue;
        }
        if (every) {
            drop(i);
        } else if (has_seq(i, s)) {
            remove_seq(i, s);
        }
    }
}

void cells::seq_cp(int64_t src, int64_t dst, int64_t p0, int64_t p1) {
    const uint32_t from = check_seq(src, "source sequence");
    const uint32_t to = check_seq(dst, "destination sequence");
    const pos_range range(p0, p1);
    for (uint32_t i = 0; i < n_kv_; ++i) {
        if (has_seq(i, from) && range.contains(pos_[i])) {
            seq_[size_t{i} * n_words_ + to / 64] |= uint64_t{1} << (to % 64);
        }
    }
}

void cells::seq_keep(int64_t seq) {
    const uint32_t s = check_seq(seq, "sequence");
    seq_set only = make_set();
    only[s / 64] = uint64_t{1} << (s % 64);
    for (uint32_t i = 0, end = n_kv_; i < end; ++i) {
        if (is_empty(i)) {
            continue;
        }
        if (has_seq(i, s)) {
            std::copy(only.begin(), only.end(), seq_.begin() + static_cast<ptrdiff_t>(i) * n_words_);
        } else {
            drop(i);
        }
    }
}

bool cells::affects(const reposition & change, uint32_t i) const {
    return has_seq(i, change.seq) && pos_[i] >= change.p0 && pos_[i] < change.p1;
}

reposition cells::check_add(int64_t seq, int64_t p0, int64_t p1, int64_t delta) const {
    const pos_range range(p0, p1);
    // beyond these bounds every position falls off the same end
    const int64_t bounded = std::clamp<int64_t>(delta, -2 * POS_MAX, 2 * POS_MAX);
    const reposition change = {check_seq(seq, "sequence"), range.p0, range.p1, 1, bounded};
    for (uint32_t i = 0; i < n_kv_; ++i) {
        if (affects(change, i) && change.next(pos_[i]) > POS_MAX) {
            fail(KVG_INVALID_ARGUMENT, "seq_add by %lld would move position %d past the largest, %lld",
                 static_cast<long long>(delta), pos_[i], static_cast<long long>(POS_MAX));
        }
    }
    return change;
}

reposition cells::check_div(int64_t seq, int64_t p0, int64_t p1, int64_t d) const {
    const pos_range range(p0, p1);
    const uint32_t s = check_seq(seq, "sequence");
    if (d < 1) {
        fail(KVG_INVALID_ARGUMENT, "seq_div by %lld: the divisor must be at least 1", static_cast<long long>(d));
    }
    return {s, range.p0, range.p1, d, 0};
}

// A shared cell that would fall below 0 needs no copy: it only loses the sequence.
std::vector<uint32_t> cells::shared_in(const reposition & change) const {
    std::vector<uint32_t> shared;
    for (uint32_t i = 0; i < n_kv_; ++i) {
        if (affects(change, i) && is_shared(i) && change.next(pos_[i]) >= 0 && change.next(pos_[i]) != pos_[i]) {
            shared.push_back(i);
        }
    }
    return shared;
}

void cells::apply(const reposition & change) {
    for (uint32_t i = 0, end = n_kv_; i < end; ++i) {
        if (!affects(change, i)) {
            continue;
        }
        const int64_t next = change.next(pos_[i]);
        if (next < 0) {
            remove_seq(i, change.seq);
        } else if (next != pos_[i]) {
            // fits: the sum is the position now minus the position at the last rotation, both in 0 .. 2^31 - 1
            set_shift(i, static_cast<int32_t>(int64_t{shift_[i]} + next - pos_[i]));
            pos_[i] = static_cast<int32_t>(next);
        }
    }
}

void cells::check() const {
    uint32_t used = 0;
    uint32_t shifted = 0;
    uint32_t end = 0;
    for (uint32_t i = 0; i < size(); ++i) {
        const auto words = seq_.begin() + static_cast<ptrdiff_t>(i) * n_words_;
        const bool seen = std::any_of(words, words + n_words_, [](uint64_t w) { return w != 0; });
        if (seen == is_empty(i) || (is_empty(i) && (pos_[i] != -1 || shift_[i] != 0 || dither_[i] != 0))) {
            fail(KVG_INTERNAL, "cell %u: pos %d, shift %d, dither %d, %s", i, pos_[i], shift_[i], dither_[i],
                 seen ? "seen" : "unseen");
        }
        used += seen;
        shifted += shift_[i] != 0;
        end = seen ? i + 1 : end;
    }
    if (used != n_used_ || shifted != n_shifted_ || end != n_kv_) {
        fail(KVG_INTERNAL, "cells counted: used %u, shifted %u, end %u; kept: %u, %u, %u", used, shifted, end, n_used_,
             n_shifted_, n_kv_);
    }
}

} // namespace kvg
