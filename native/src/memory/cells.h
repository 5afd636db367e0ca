// The records of all cells: position, sequences, pending K-shift, holds. This code does not touch tensors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

#include "memory/pos_index.h"
#include "memory/pos_set.h"
#include "memory/seq_extent.h"

namespace kvg {

constexpr uint32_t MAX_SEQS = 256;

// A set of sequence ids: bit i of word w is sequence 64 * w + i. All sets of one cache have the same number of words.
using seq_set = std::vector<uint64_t>;

// Calls visit(id) for each member of a set.
template <class F> void each_member(const uint64_t * words, std::size_t n_words, F visit) {
    for (std::size_t w = 0; w < n_words; ++w) {
        for (uint64_t bits = words[w]; bits; bits &= bits - 1) {
            visit(static_cast<uint32_t>(w * 64) + static_cast<uint32_t>(__builtin_ctzll(bits)));
        }
    }
}

// Whether the sets have a member in common. precondition: they are as long
inline bool meets(const seq_set & a, const seq_set & b) {
    for (std::size_t w = 0; w < a.size(); ++w) {
        if (a[w] & b[w]) {
            return true;
        }
    }
    return false;
}

// Neighbouring cells.
struct cell_span {
    uint32_t begin;
    uint32_t n;

    bool operator==(const cell_span & o) const { return begin == o.begin && n == o.n; }
};

// The content of cell src moves to cell dst.
struct cell_move {
    uint32_t src;
    uint32_t dst;
};

// The contents of n neighbouring cells, from src on, move to the cells from dst on.
struct cell_run {
    uint32_t src;
    uint32_t dst;
    uint32_t n;
};

// A change of positions that was checked: each cell of the sequence with pos in [p0, p1) gets the position pos / d + delta.
struct reposition {
    uint32_t seq;
    int64_t p0;
    int64_t p1;
    int64_t d;
    int64_t delta;

    int64_t next(int32_t pos) const { return pos / d + delta; }
    bool contains(int64_t pos) const { return pos >= p0 && pos < p1; }
    // whether any position changes; 0 divided is 0
    bool moves() const { return d > 1 ? p1 > std::max<int64_t>(p0, 1) : delta != 0 && p1 > p0; }
    // the position of whatever was at `pos`
    int64_t after(int64_t pos) const { return contains(pos) ? pos / d + delta : pos; }
};

// The place of one token.
struct cell {
    int32_t pos = -1;         // -1 when empty
    int32_t shift = 0;        // new position - the position for which K was last rotated
    uint32_t n_holds = 0;     // how many holds keep the cell
    uint32_t id = 0;          // names the content: it moves with the content to another cell
    bool is_reserved = false; // its content is written from outside, and no sequence sees it yet
    uint8_t dither = 0;       // the dither that K carries (shift/dither.h); none when 0 (K as written) or 1 (K rotated once)
    uint16_t state_row = 0;   // the row of the hidden state behind the token (memory/last_states.h) + 1; 0: none
};

// A cell, and sequences that leave it, as it was before.
struct left_cell {
    uint32_t i;
    int32_t pos;
    int32_t shift;
    uint8_t dither;
    seq_set set;
};

// The cells of a hold: positions p0 to p1 - 1.
struct hold_range {
    int64_t id;
    int64_t p0;
    int64_t p1;
};

// Counts of a sequence's cells in a range of positions.
struct seq_count {
    uint32_t n;
    uint32_t n_shared; // cells that another sequence also sees, or that a hold keeps
};

class cells {
public:
    // 1 <= n_seq_max <= MAX_SEQS. window: positions that a token attends to, its own included; 0: all. reuses: with a window, whether
    // cells that their sequences have left behind may be taken for other tokens. both_ways: a token sees later positions, too, and
    // the window lies half before it
    cells(uint32_t n_cells, uint32_t n_seq_max, uint32_t window = 0, bool reuses = false, bool chunked = false,
          bool both_ways = false);

    // bytes of host memory for the record of one cell
    static uint64_t bytes_per_cell(uint32_t n_seq_max) {
        return sizeof(cell) + sizeof(uint32_t) + (n_seq_max + 63) / 64 * sizeof(uint64_t);
    }
    // The lowest position that a token sees.
    int32_t first_seen(int32_t pos) const {
        if (chunked_) {
            return pos - pos % static_cast<int32_t>(window_);
        }
        if (both_ways_) {
            return window_ == 0 ? 0 : std::max(0, pos - static_cast<int32_t>(window_ / 2));
        }
        return window_ == 0 || static_cast<uint32_t>(pos) < window_ ? 0 : pos - static_cast<int32_t>(window_) + 1;
    }
    // And the highest.
    int32_t last_seen(int32_t pos) const {
        constexpr int64_t LAST = std::numeric_limits<int32_t>::max();
        const int64_t further = !both_ways_ ? 0 : window_ == 0 ? LAST : window_ / 2;
        return static_cast<int32_t>(std::min(LAST, pos + further));
    }

    bool reuses() const { return reuses_; }
    // New tokens take cells before this one only; the others are for what has aged (memory/aging.h). 0: they take any
    uint32_t n_fresh() const { return n_fresh_; }
    void set_n_fresh(uint32_t n) { n_fresh_ = n; }
    uint32_t size() const { return static_cast<uint32_t>(cells_.size()); }
    uint32_t n_seq_max() const { return n_seq_max_; }
    uint32_t n_used() const { return n_used_; }
    // highest used cell + 1
    uint32_t n_kv() const { return n_kv_; }
    // highest cell that was used or touched since the last clear(), + 1
    uint32_t n_touched() const { return n_touched_; }
    // cells whose K-shift is pending
    uint32_t n_shifted() const { return n_shifted_; }
    // a number that changes whenever the shift() of any cell changes
    uint64_t shift_version() const { return shift_version_; }

    bool is_empty(uint32_t i) const { return cells_[i].pos < 0; }
    int32_t pos(uint32_t i) const { return cells_[i].pos; }
    int32_t shift(uint32_t i) const { return cells_[i].shift; }
    uint8_t dither(uint32_t i) const { return cells_[i].dither; }
    // A name of the content, which stays with the content when this moves to another cell; and the cell that has it.
    uint32_t id(uint32_t i) const { return cells_[i].id; }
    uint32_t cell_of(uint32_t id) const { return place_[id]; }
    uint16_t state_row(uint32_t i) const { return cells_[i].state_row; }
    void set_state_row(uint32_t i, uint16_t row) { cells_[i].state_row = row; }
    bool has_seq(uint32_t i, uint32_t seq) const { return (words(i)[seq / 64] >> (seq % 64)) & 1; }
    const uint64_t * words(uint32_t i) const { return seq_.data() + std::size_t{i} * n_words_; }
    uint32_t n_words() const { return n_words_; }
    uint32_t n_holds(uint32_t i) const { return cells_[i].n_holds; }
    bool is_reserved(uint32_t i) const { return cells_[i].is_reserved; }
    // whether several sequences see the cell, or a hold keeps it beside a sequence
    bool is_shared(uint32_t i) const;
    seq_set set(uint32_t i) const;
    // whether any sequence of the set sees the cell
    bool meets(uint32_t i, const seq_set & set) const {
        for (uint32_t w = 0; w < n_words_; ++w) {
            if (words(i)[w] & set[w]) {
                return true;
            }
        }
        return false;
    }
    // whether all sequences of the set see the cell
    bool covers(uint32_t i, const seq_set & set) const;

    // The exact extent of a sequence: its range of positions, its range of cells, its number of cells. This is fast, except for the first
    // call after cells at an end of a sequence were removed: then the cells between the old ends of such sequences are searched.
    const seq_extent & extent(int64_t seq) const;
    // -1 when the sequence has no cells
    int32_t seq_pos_min(int64_t seq) const;
    int32_t seq_pos_max(int64_t seq) const;
    seq_count count(int64_t seq, int64_t p0, int64_t p1) const;
    // whether the sequence has a cell at any of these positions
    bool has_any(uint32_t seq, int64_t p0, int64_t p1) const;
    // the sequence's cells from position p0 on, by position
    std::vector<uint32_t> of_seq(int64_t seq, int64_t p0) const;
    // From the lowest to the highest cell that the sequence sees at position `lowest` or later; n = 0 when there is none. The time is
    // in proportion to the number of such positions, except for the first call after the sequence lost cells.
    cell_span span_from(uint32_t seq, int32_t lowest) const;
    // All cells that a token of these sequences sees at positions `lowest` to `pos`, if that is known without reading the cells: the set
    // has one sequence, its cells are neighbours without a gap, and none has another position. Otherwise n = 0.
    cell_span seen_run(const seq_set & set, int32_t lowest, int32_t pos) const;

    // An empty set, with as many words as this cache needs.
    seq_set make_set() const { return seq_set(n_words_, 0); }

    // A token takes the cell. precondition: the cell is empty, pos >= 0, the set has a member
    void put(uint32_t i, int32_t pos, const seq_set & set);
    // For K that was copied into the cell from elsewhere, with its dither.
    void set_dither(uint32_t i, uint8_t dither) { cells_[i].dither = dither; }
    // No sequence sees the cell any more. It becomes empty, unless a hold keeps it. precondition: it is not empty
    void drop(uint32_t i);
    // These sequences don't see the cell any more. It becomes empty, unless somebody else needs it. precondition: they see it
    void leave(const left_cell & left) noexcept;
    // They see it again. precondition: if it became empty, nothing was written there
    void come_back(const left_cell & left) noexcept;
    // Does all moves at once, so they may form cycles. Throws std::bad_alloc, with nothing changed, when there is no memory for that.
    // precondition: sources are not empty; a destination is empty or itself a source
    void move(const std::vector<cell_move> & moves);
    // Call it before the cell's row is written, whether or not the cell will be used.
    void touch(uint32_t i) { n_touched_ = n_touched_ > i ? n_touched_ : i + 1; }
    // The sequence and its checkpoints leave src, and have dst instead, a copy with the same position and pending shift. precondition: dst
    // is empty
    void fork(uint32_t src, uint32_t dst, uint32_t seq) noexcept;
    // Every cell becomes empty, and every hold is released.
    void clear();
    // These cells have rows of several tokens from now on, and stand at the last of their positions. K owes no shift, and carries this
    // dither. precondition: the sequence sees them, and nobody else
    void compose(const std::vector<uint32_t> & composed, uint32_t seq, int32_t pos, uint8_t dither);
    // K was rotated to the cell's position and carries this dither now. The cell's K-shift is no longer pending.
    void set_rotated(uint32_t i, uint8_t dither);

    // The operations of the public interface. Ranges are [p0, p1); a negative p0 means 0, a negative p1 means no end. Any integer is
    // safe: an id out of range, d < 1 or a position past 2^31 - 1 throws error(KVG_INVALID_ARGUMENT) with nothing changed.
    void seq_rm(int64_t seq, int64_t p0, int64_t p1);
    // precondition: there are positions, they rise, none is below 0
    void seq_rm_at(int64_t seq, const std::vector<int32_t> & positions);
    void seq_cp(int64_t src, int64_t dst, int64_t p0, int64_t p1);
    void seq_keep(int64_t seq);
    // seq_add and seq_div have two halves: check_add() or check_div(), and then apply(). Between them the caller must fork() the cells of
    // shared_in(), because all sequences that see a cell see it at the same position.
    reposition check_add(int64_t seq, int64_t p0, int64_t p1, int64_t delta) const;
    reposition check_div(int64_t seq, int64_t p0, int64_t p1, int64_t d) const;
    std::vector<uint32_t> shared_in(const reposition & change) const;
    // What is lost moves, too. precondition: shared_in(change) is empty
    void apply(const reposition & change);

    // A hold is a set of cells under an id. Its cells keep their positions and contents until release() or clear(), whatever is done to
    // the sequence. Any integer is safe, as above.
    // hold(): the sequence must see a cell at every position of the range. Where cells are reused the hold keeps none, and positions that
    // were lost will do. precondition: no hold has that id
    hold_range hold(int64_t id, int64_t seq, int64_t p0, int64_t p1);
    // The sequence sees the cells of the hold too. Its last position must be the one before the hold's first.
    hold_range attach(int64_t hold, int64_t seq, int64_t p1 = -1);
    void release(int64_t hold);
    // A hold of what the sequence needs to go on before position `next`: its cells from there back, as far as the window reaches.
    // is_checkpoint: it is the sequence's own, so that these cells move with the sequence, and are removed with it. precondition: no hold
    // has that id
    void hold_window(int64_t id, int64_t seq, int64_t next, bool is_checkpoint);
    // The same, of all positions after `lost`.
    void hold_after(int64_t id, uint32_t seq, int32_t lost, int64_t next, bool is_checkpoint);
    // The sequence sees what hold_window() held, and has lost what was before that. precondition: there is that hold
    void restore_window(int64_t hold, int64_t seq);
    bool has_hold(int64_t hold) const { return holds_.count(hold) > 0; }
    // The cells of a hold, by position.
    std::vector<uint32_t> held(int64_t hold) const;
    // of a hold of hold_window(): the highest position before it that the sequence has, or has lost; -1: none
    int32_t lost_before(int64_t hold, uint32_t seq) const;
    // of a hold of hold_window(): its first position
    int64_t first_held(int64_t hold) const { return find_hold(hold).p0; }
    // Whether a checkpoint's cells are still what a token at `next` needs, when the change has moved them.
    bool keeps_checkpoint(const reposition & change, int64_t hold, int64_t next) const;
    // The sequence no longer sees the cell. precondition: it does
    void leave(uint32_t i, uint32_t seq) { remove_seq(i, seq); }
    // Of each cell, how many checkpoints of the sequence hold it. Empty when it has none.
    std::vector<uint32_t> own_holds(uint32_t seq) const;

    // Reserves empty cells for content that is written before any sequence sees it. The cells get its positions and dithers. Defrag does
    // not move them until show_reserved(), give_back() or clear(). precondition: the cells are empty, and all different
    void reserve(const std::vector<uint32_t> & empty, const int32_t * positions, const uint8_t * dithers);
    // The sequence sees these cells, which are no longer reserved. precondition: they are reserved
    void show_reserved(const std::vector<uint32_t> & reserved, int64_t seq);
    // These cells become empty again. precondition: they are reserved
    void give_back(const std::vector<uint32_t> & reserved);

    // What windows lose (window.cpp). A cell is left behind when it is at or below the last position less the window in each of its
    // sequences, and nothing holds it. Reusing it takes it from them, and with it all that they have before it.
    // The highest position that the sequence has lost, and it sees nothing up to there; -1: none
    int32_t lost(int64_t seq) const { return lost_[check_seq(seq, "sequence")].max(); }
    // whether it has lost any position of a range
    bool has_lost(int64_t seq, int64_t p0, int64_t p1) const;
    // The sequence loses all that it has up to a position.
    void lose(int64_t seq, int32_t last);
    // Nobody knows here what the sequence had up to a position, and it has lost that. all: a group that has every position of the sequence,
    // so that it tells; nullptr: all of them count as lost
    void assume_lost(int64_t seq, int32_t last, const cells * all);
    // Of a text all that is before `first`, from 0 on, is lost, and what comes behind that is not.
    void begin_window(int64_t seq, int32_t first);
    // The sequence gets positions [p0, p1), which it has lost. precondition: p0 < p1
    void skip(int64_t seq, int64_t p0, int64_t p1);
    // whether all that a token at this position may attend to is there
    bool can_go_on(int64_t seq, int32_t pos) const { return lost(seq) < first_seen(pos); }
    // Cells that are empty or may be reused. kept: a sequence whose cells are left alone; NOBODY: none is
    static constexpr uint32_t NOBODY = MAX_SEQS;
    uint32_t n_available(uint32_t kept = NOBODY) const;
    // Reuses what was left behind longest until n cells are empty. precondition: n <= n_available(kept)
    void make_room(uint32_t n, uint32_t kept = NOBODY);
    // error(KVG_UNSUPPORTED) when the change would bring a lost position into the window of a later token
    void require_window(const reposition & change, const char * op) const;
    // Whether it would not even if the sequence had lost all that it has left behind.
    bool may_lose(const reposition & change) const;
    // the highest position that the sequence has left behind, -1: none
    int32_t left_behind(uint32_t seq) const;

    // Checks what must be true after every call. error(KVG_INTERNAL), with the first condition that is not met
    void check() const;

private:
    struct held_cells {
        int64_t p0; // of a window: after the last position that it has not
        int64_t p1;
        std::vector<uint32_t> ids; // of the cells, in order of position
        bool is_window = false;    // not all positions need be there, nor in order
        uint32_t owner = NOBODY;   // the sequence whose checkpoint it is
    };

    uint64_t * words(uint32_t i) { return seq_.data() + std::size_t{i} * n_words_; }
    uint32_t check_seq(int64_t seq, const char * what) const;
    template <class F> void each_affected(const reposition & change, F visit) const;
    void take_from(uint32_t i, uint32_t seq);
    void move_cell(uint32_t i, int32_t pos, uint32_t seq);
    void move_checkpoints(uint32_t seq, uint32_t src, uint32_t dst) noexcept;
    void occupy(uint32_t i, int32_t pos);
    void vacate_if_free(uint32_t i);
    void take_out(uint32_t i);
    void number_cells();
    void swap_ids(uint32_t a, uint32_t b);
    void add_seq(uint32_t i, uint32_t seq);
    void show(uint32_t i, uint32_t seq);
    void remove_seq(uint32_t i, uint32_t seq);
    void set_shift(uint32_t i, int32_t shift);
    void tighten() const;
    void check_cells() const;
    void check_extents() const;
    const held_cells & find_hold(int64_t id) const;
    int64_t hold_run(uint32_t seq, held_cells & held) const;
    const pos_index::order & order_of(uint32_t seq) const;
    void check_holds() const;
    bool is_reusable(uint32_t i, uint32_t kept) const;
    pos_set had_upto(uint32_t seq, int32_t last) const;
    bool keeps_window(const reposition & change, const pos_set & lost) const;

    uint32_t n_seq_max_;
    uint32_t n_words_;
    bool chunked_; // a token attends to its own chunk of so many positions
    bool both_ways_;
    uint32_t window_;
    bool reuses_;
    uint32_t n_fresh_ = 0;
    uint32_t n_used_ = 0;
    uint32_t n_kv_ = 0;
    uint32_t n_touched_ = 0;
    uint32_t n_shifted_ = 0;
    uint64_t shift_version_ = 0;
    std::vector<cell> cells_;
    std::vector<uint64_t> seq_;                     // (n_cells, n_words): who sees each cell
    mutable std::vector<seq_extent> extents_;       // of each sequence; made exact by extent()
    std::vector<uint32_t> place_;                   // the cell of each id; ids are a permutation of the cells
    mutable pos_index index_;                       // the order of a sequence is made when it is first needed
    std::unordered_map<int64_t, held_cells> holds_; // by id
    std::vector<std::vector<int64_t>> checkpoints_; // of each sequence: the ids of holds
    std::vector<pos_set> lost_;                     // of each sequence
};

} // namespace kvg
