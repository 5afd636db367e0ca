#include "memory/cells.h"

#include <algorithm>
#include <array>

#include "error.h"
#include "memory/pos_range.h"

namespace kvg {

namespace {

bool has_member(const uint64_t * words, uint32_t n_words) {
    return std::any_of(words, words + n_words, [](uint64_t word) { return word != 0; });
}

} // namespace

cells::cells(uint32_t n_cells, uint32_t n_seq_max, uint32_t window, bool reuses, bool chunked, bool both_ways)
    : n_seq_max_(n_seq_max), n_words_((n_seq_max + 63) / 64), chunked_(chunked), both_ways_(both_ways), window_(window),
      reuses_(reuses), cells_(n_cells), seq_(static_cast<size_t>(n_cells) * n_words_, 0), extents_(n_seq_max), place_(n_cells),
      index_(n_seq_max), checkpoints_(n_seq_max), lost_(n_seq_max) {
    number_cells();
}

void cells::number_cells() {
    for (uint32_t i = 0; i < size(); ++i) {
        cells_[i].id = place_[i] = i;
    }
}

bool cells::covers(uint32_t i, const seq_set & set) const {
    for (uint32_t w = 0; w < n_words_; ++w) {
        if ((words(i)[w] & set[w]) != set[w]) {
            return false;
        }
    }
    return true;
}

bool cells::is_shared(uint32_t i) const {
    uint32_t n = n_holds(i);
    for (uint32_t w = 0; w < n_words_ && n < 2; ++w) {
        n += static_cast<uint32_t>(__builtin_popcountll(words(i)[w]));
    }
    return n > 1;
}

seq_set cells::set(uint32_t i) const { return seq_set(words(i), words(i) + n_words_); }

uint32_t cells::check_seq(int64_t seq, const char * what) const {
    if (seq < 0 || seq >= n_seq_max_) {
        fail(KVG_INVALID_ARGUMENT, "%s %lld is out of range: this cache has sequences 0 to %u (n_seq_max = %u)", what,
             static_cast<long long>(seq), n_seq_max_ - 1, n_seq_max_);
    }
    return static_cast<uint32_t>(seq);
}

const seq_extent & cells::extent(int64_t seq) const {
    const uint32_t s = check_seq(seq, "sequence");
    if (!extents_[s].is_tight) {
        tighten();
    }
    return extents_[s];
}

int32_t cells::seq_pos_min(int64_t seq) const {
    const seq_extent & found = extent(seq);
    return found.n ? found.pos_min : -1;
}

int32_t cells::seq_pos_max(int64_t seq) const { return extent(seq).pos_max; }

seq_count cells::count(int64_t seq, int64_t p0, int64_t p1) const {
    const seq_extent & where = extents_[check_seq(seq, "sequence")];
    const pos_range range(p0, p1);
    seq_count found = {0, 0};
    for (uint32_t i = where.begin; i < where.end; ++i) {
        if (has_seq(i, static_cast<uint32_t>(seq)) && range.contains(pos(i))) {
            ++found.n;
            found.n_shared += is_shared(i);
        }
    }
    return found;
}

bool cells::has_any(uint32_t seq, int64_t p0, int64_t p1) const {
    const seq_extent & where = extents_[seq];
    const pos_range range(p0, p1);
    if (range.contains(where.pos_min) && range.contains(where.pos_max)) {
        return where.n > 0;
    }
    for (uint32_t i = where.begin; i < where.end; ++i) {
        if (has_seq(i, seq) && range.contains(pos(i))) {
            return true;
        }
    }
    return false;
}

std::vector<uint32_t> cells::of_seq(int64_t seq, int64_t p0) const {
    const seq_extent & where = extents_[check_seq(seq, "sequence")];
    std::vector<uint32_t> found;
    for (uint32_t i = where.begin; i < where.end; ++i) {
        if (has_seq(i, static_cast<uint32_t>(seq)) && pos(i) >= p0) {
            found.push_back(i);
        }
    }
    std::stable_sort(found.begin(), found.end(), [&](uint32_t a, uint32_t b) { return pos(a) < pos(b); });
    return found;
}

cell_span cells::span_from(uint32_t seq, int32_t lowest) const {
    const seq_extent & all = extent(seq);
    if (all.n == 0 || all.pos_min >= lowest) {
        return {all.n ? all.begin : 0, all.n ? all.end - all.begin : 0};
    }
    seq_extent found;
    if (reuses_) { // few cells, and an order of them would be forgotten with every token
        for (uint32_t i = all.begin; i < all.end; ++i) {
            if (has_seq(i, seq) && pos(i) >= lowest) {
                found.include(pos(i), i);
            }
        }
        return {found.end ? found.begin : 0, found.end ? found.end - found.begin : 0};
    }
    const pos_index::order & order = order_of(seq);
    for (auto it = order.rbegin(); it != order.rend() && it->pos >= lowest; ++it) {
        found.include(it->pos, place_[it->id]);
    }
    return {found.end ? found.begin : 0, found.end ? found.end - found.begin : 0};
}

cell_span cells::seen_run(const seq_set & set, int32_t lowest, int32_t pos) const {
    uint32_t n_members = 0;
    uint32_t member = 0;
    each_member(set.data(), n_words_, [&](uint32_t s) {
        ++n_members;
        member = s;
    });
    const seq_extent & found = extent(member);
    const bool is_run =
        n_members == 1 && found.n > 0 && found.end - found.begin == found.n && found.pos_max <= pos && found.pos_min >= lowest;
    return is_run ? cell_span{found.begin, found.n} : cell_span{0, 0};
}

// All extents that are not tight at once: after an operation on every sequence each cell is looked at once, not once for each of them.
void cells::tighten() const {
    std::array<uint64_t, MAX_SEQS / 64> loose = {};
    uint32_t begin = size();
    uint32_t end = 0;
    for (uint32_t s = 0; s < n_seq_max_; ++s) {
        seq_extent & extent = extents_[s];
        if (!extent.is_tight) {
            loose[s / 64] |= uint64_t{1} << (s % 64);
            begin = std::min(begin, extent.begin);
            end = std::max(end, extent.end);
            const uint32_t n = extent.n;
            extent = {};
            extent.n = n;
        }
    }
    for (uint32_t i = begin; i < end; ++i) {
        for (uint32_t w = 0; w < n_words_; ++w) {
            for (uint64_t bits = words(i)[w] & loose[w]; bits; bits &= bits - 1) {
                extents_[w * 64 + static_cast<uint32_t>(__builtin_ctzll(bits))].include(pos(i), i);
            }
        }
    }
}

void cells::set_shift(uint32_t i, int32_t shift) {
    int32_t & now = cells_[i].shift;
    shift_version_ += now != shift;
    n_shifted_ -= now != 0;
    now = shift;
    n_shifted_ += now != 0;
}

void cells::occupy(uint32_t i, int32_t pos) {
    cells_[i].pos = pos;
    ++n_used_;
    n_kv_ = std::max(n_kv_, i + 1);
    touch(i);
}

// precondition: no sequence sees it
void cells::take_out(uint32_t i) {
    set_shift(i, 0);
    const uint32_t id = cells_[i].id;
    cells_[i] = {};
    cells_[i].id = id;
    --n_used_;
    while (n_kv_ > 0 && is_empty(n_kv_ - 1)) {
        --n_kv_;
    }
}

// Whether nobody needs it any more, after a sequence or a hold let go.
void cells::vacate_if_free(uint32_t i) {
    if (n_holds(i) == 0 && !is_reserved(i) && !has_member(words(i), n_words_)) {
        take_out(i);
    }
}

void cells::swap_ids(uint32_t a, uint32_t b) {
    std::swap(cells_[a].id, cells_[b].id);
    place_[cells_[a].id] = a;
    place_[cells_[b].id] = b;
}

void cells::add_seq(uint32_t i, uint32_t seq) {
    words(i)[seq / 64] |= uint64_t{1} << (seq % 64);
    extents_[seq].add(pos(i), i);
}

// A sequence gets a cell more.
void cells::show(uint32_t i, uint32_t seq) {
    add_seq(i, seq);
    index_.append(seq, pos(i), cells_[i].id);
}

void cells::remove_seq(uint32_t i, uint32_t seq) {
    words(i)[seq / 64] &= ~(uint64_t{1} << (seq % 64));
    extents_[seq].remove(pos(i), i);
    index_.forget(seq);
    vacate_if_free(i);
}

void cells::put(uint32_t i, int32_t pos, const seq_set & set) {
    occupy(i, pos);
    each_member(set.data(), n_words_, [&](uint32_t s) { show(i, s); });
}

void cells::drop(uint32_t i) {
    each_member(words(i), n_words_, [&](uint32_t s) { remove_seq(i, s); });
}

void cells::leave(const left_cell & left) noexcept {
    each_member(left.set.data(), n_words_, [&](uint32_t s) { remove_seq(left.i, s); });
}

void cells::come_back(const left_cell & left) noexcept {
    if (is_empty(left.i)) {
        occupy(left.i, left.pos);
        set_shift(left.i, left.shift);
        cells_[left.i].dither = left.dither;
    }
    each_member(left.set.data(), n_words_, [&](uint32_t s) { show(left.i, s); });
}

void cells::move(const std::vector<cell_move> & moves) {
    struct content {
        cell token;
        seq_set set;
    };
    std::vector<content> taken;
    taken.reserve(moves.size());
    for (const cell_move & m : moves) {
        taken.push_back({cells_[m.src], set(m.src)});
    }
    // nothing is allocated from here on
    for (const cell_move & m : moves) {
        each_member(words(m.src), n_words_, [&](uint32_t s) { extents_[s].remove(pos(m.src), m.src); });
        std::fill_n(words(m.src), n_words_, 0);
        take_out(m.src);
    }
    for (size_t i = 0; i < moves.size(); ++i) {
        const uint32_t dst = moves[i].dst;
        const cell & token = taken[i].token;
        occupy(dst, token.pos);
        each_member(taken[i].set.data(), n_words_, [&](uint32_t s) { add_seq(dst, s); });
        set_shift(dst, token.shift);
        cells_[dst].dither = token.dither;
        cells_[dst].state_row = token.state_row;
        cells_[dst].n_holds = token.n_holds;
        swap_ids(dst, place_[token.id]);
    }
}

void cells::fork(uint32_t src, uint32_t dst, uint32_t seq) noexcept {
    occupy(dst, pos(src));
    set_shift(dst, shift(src));
    cells_[dst].dither = dither(src);
    move_checkpoints(seq, src, dst);
    if (has_seq(src, seq)) {
        show(dst, seq);
        remove_seq(src, seq);
    }
}

void cells::reserve(const std::vector<uint32_t> & empty, const int32_t * positions, const uint8_t * dithers) {
    for (size_t n = 0; n < empty.size(); ++n) {
        occupy(empty[n], positions[n]);
        cells_[empty[n]].dither = dithers[n];
        cells_[empty[n]].is_reserved = true;
    }
}

void cells::show_reserved(const std::vector<uint32_t> & reserved, int64_t seq) {
    const uint32_t s = check_seq(seq, "sequence");
    for (const uint32_t i : reserved) {
        cells_[i].is_reserved = false;
        show(i, s);
    }
}

void cells::give_back(const std::vector<uint32_t> & reserved) {
    for (const uint32_t i : reserved) {
        take_out(i);
    }
}

void cells::clear() {
    std::fill(cells_.begin(), cells_.end(), cell{});
    std::fill(seq_.begin(), seq_.end(), 0);
    std::fill(extents_.begin(), extents_.end(), seq_extent{});
    holds_.clear();
    for (uint32_t s = 0; s < n_seq_max_; ++s) {
        index_.forget(s);
        checkpoints_[s].clear();
        lost_[s] = {};
    }
    number_cells();
    n_used_ = n_kv_ = n_touched_ = n_shifted_ = 0;
    ++shift_version_;
}

void cells::set_rotated(uint32_t i, uint8_t dither) {
    cells_[i].dither = dither;
    set_shift(i, 0);
}

void cells::compose(const std::vector<uint32_t> & composed, uint32_t seq, int32_t pos, uint8_t dither) {
    index_.forget(seq);
    for (const uint32_t i : composed) {
        extents_[seq].remove(cells_[i].pos, i);
        set_shift(i, 0);
        cells_[i].pos = pos;
        cells_[i].dither = dither;
        cells_[i].state_row = 0; // no token stands for it
        extents_[seq].add(pos, i);
    }
}

void cells::check() const {
    check_cells();
    check_extents();
    check_holds();
}

void cells::check_cells() const {
    uint32_t n_used = 0;
    uint32_t shifted = 0;
    uint32_t end = 0;
    for (uint32_t i = 0; i < size(); ++i) {
        const cell & c = cells_[i];
        const bool seen = has_member(words(i), n_words_);
        const bool used = seen || c.n_holds > 0 || c.is_reserved;
        if (used == is_empty(i) || (is_empty(i) && (c.pos != -1 || c.shift != 0 || c.dither != 0))) {
            fail(KVG_INTERNAL, "cell %u: pos %d, shift %d, dither %d, %s", i, c.pos, c.shift, c.dither,
                 seen ? "seen" : "unseen");
        }
        n_used += used;
        shifted += c.shift != 0;
        end = used ? i + 1 : end;
    }
    if (n_used != n_used_ || shifted != n_shifted_ || end != n_kv_) {
        fail(KVG_INTERNAL, "cells counted: used %u, shifted %u, end %u; kept: %u, %u, %u", n_used, shifted, end, n_used_,
             n_shifted_, n_kv_);
    }
}

void cells::check_extents() const {
    std::vector<seq_extent> counted(n_seq_max_);
    for (uint32_t i = 0; i < size(); ++i) {
        each_member(words(i), n_words_, [&](uint32_t s) {
            counted.at(s).add(pos(i), i);
            if (pos(i) <= lost(s)) {
                fail(KVG_INTERNAL, "sequence %u sees cell %u at %d, and has lost all up to %d", s, i, pos(i), lost(s));
            }
        });
    }
    for (uint32_t s = 0; s < n_seq_max_; ++s) {
        const seq_extent & is = counted[s];
        const seq_extent & kept = extents_[s];
        const bool same =
            kept.pos_min == is.pos_min && kept.pos_max == is.pos_max && kept.begin == is.begin && kept.end == is.end;
        const bool around =
            kept.pos_min <= is.pos_min && kept.pos_max >= is.pos_max && kept.begin <= is.begin && kept.end >= is.end;
        if (kept.n != is.n || !(kept.is_tight ? same : around)) {
            fail(KVG_INTERNAL,
                 "sequence %u counted: %u cells in [%u, %u), positions %d to %d; kept, %s: %u in [%u, %u), %d to %d", s, is.n,
                 is.begin, is.end, is.pos_min, is.pos_max, kept.is_tight ? "tight" : "loose", kept.n, kept.begin, kept.end,
                 kept.pos_min, kept.pos_max);
        }
    }
}

} // namespace kvg
