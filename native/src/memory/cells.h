// The cells' bookkeeping: position, set of sequences, pending K-shift. Knows nothing of tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "memory/pos_index.h"
#include "memory/seq_extent.h"

namespace kvg {

constexpr uint32_t MAX_SEQS = 256;

// A set of sequence ids as words of 64 bits, little end first. All sets of one cache have the same number of words.
using seq_set = std::vector<uint64_t>;

// Calls visit(id) for each member of a set.
template <class F> void each_member(const uint64_t * words, std::size_t n_words, F visit) {
    for (std::size_t w = 0; w < n_words; ++w) {
        for (uint64_t bits = words[w]; bits; bits &= bits - 1) {
            visit(static_cast<uint32_t>(w * 64) + static_cast<uint32_t>(__builtin_ctzll(bits)));
        }
    }
}

// Neighbouring cells.
struct cell_span {
    uint32_t begin;
    uint32_t n;

    bool operator==(const cell_span & o) const { return begin == o.begin && n == o.n; }
};

// One cell's content goes from src to dst.
struct cell_move {
    uint32_t src;
    uint32_t dst;
};

// n cells from src on go to dst on.
struct cell_run {
    uint32_t src;
    uint32_t dst;
    uint32_t n;
};

// A change of position that was checked: each cell of the sequence in [p0, p1) goes from pos to pos / d + delta.
struct reposition {
    uint32_t seq;
    int64_t p0;
    int64_t p1;
    int64_t d;
    int64_t delta;

    int64_t next(int32_t pos) const { return pos / d + delta; }
};

// One token's place.
struct cell {
    int32_t pos = -1;         // -1 when empty
    int32_t shift = 0;        // new position - the position for which K was last rotated
    uint32_t n_holds = 0;     // that keep it, whoever sees it
    uint32_t id = 0;          // goes with the content when that moves to another cell
    bool is_reserved = false; // for content that comes from outside, and is not shown yet
    uint8_t dither = 0;       // which dither K carries (shift/dither.h): 0, as it was written, and 1, rotated once, none
};

// What hold() took: positions p0 to p1 - 1.
struct hold_range {
    int64_t id;
    int64_t p0;
    int64_t p1;
};

// Of a sequence's cells in a range of positions.
struct seq_count {
    uint32_t n;
    uint32_t n_shared; // that another sequence sees or a hold keeps
};

class cells {
public:
    // 1 <= n_seq_max <= MAX_SEQS
    cells(uint32_t n_cells, uint32_t n_seq_max);

    // of host memory, for one cell
    static uint64_t bytes_per_cell(uint32_t n_seq_max) {
        return sizeof(cell) + sizeof(uint32_t) + (n_seq_max + 63) / 64 * sizeof(uint64_t);
    }

    uint32_t size() const { return static_cast<uint32_t>(cells_.size()); }
    uint32_t n_seq_max() const { return n_seq_max_; }
    uint32_t n_used() const { return n_used_; }
    // highest used cell + 1
    uint32_t n_kv() const { return n_kv_; }
    // highest cell that was used or touched since clear(), + 1
    uint32_t n_touched() const { return n_touched_; }
    // cells whose K-shift is pending
    uint32_t n_shifted() const { return n_shifted_; }
    // another number after any cell's shift() changed
    uint64_t shift_version() const { return shift_version_; }

    bool is_empty(uint32_t i) const { return cells_[i].pos < 0; }
    int32_t pos(uint32_t i) const { return cells_[i].pos; }
    int32_t shift(uint32_t i) const { return cells_[i].shift; }
    uint8_t dither(uint32_t i) const { return cells_[i].dither; }
    bool has_seq(uint32_t i, uint32_t seq) const { return (words(i)[seq / 64] >> (seq % 64)) & 1; }
    const uint64_t * words(uint32_t i) const { return seq_.data() + std::size_t{i} * n_words_; }
    uint32_t n_words() const { return n_words_; }
    uint32_t n_holds(uint32_t i) const { return cells_[i].n_holds; }
    bool is_reserved(uint32_t i) const { return cells_[i].is_reserved; }
    // whether a sequence that sees it isn't alone: another one sees it too, or a hold keeps it
    bool is_shared(uint32_t i) const;
    seq_set set(uint32_t i) const;
    // whether the cell shares a sequence with the set
    bool meets(uint32_t i, const seq_set & set) const {
        for (uint32_t w = 0; w < n_words_; ++w) {
            if (words(i)[w] & set[w]) {
                return true;
            }
        }
        return false;
    }
    // whether all of them see it
    bool covers(uint32_t i, const seq_set & set) const;

    // All that is known of a sequence, tight. Costs nothing, but for the first time after cells at one of its ends were taken away: then
    // the cells between the ends of all such sequences are looked at.
    const seq_extent & extent(int64_t seq) const;
    // -1 when the sequence has no cells
    int32_t seq_pos_min(int64_t seq) const;
    int32_t seq_pos_max(int64_t seq) const;
    seq_count count(int64_t seq, int64_t p0, int64_t p1) const;
    // From the lowest to the highest cell that the sequence sees at this position and later ones; n = 0 when there is none. Costs as
    // much as there are such positions, but for the first time after the sequence lost cells.
    cell_span span_from(uint32_t seq, int32_t lowest) const;
    // All cells that a token of these sequences sees, with positions from `lowest` to `pos`, where that can be told without looking at
    // them: one sequence, no gap between its cells, no other position. Else n = 0.
    cell_span seen_run(const seq_set & set, int32_t lowest, int32_t pos) const;

    // An empty set of this cache's width.
    seq_set make_set() const { return seq_set(n_words_, 0); }

    // precondition: the cell is empty, pos >= 0, the set has a member
    void put(uint32_t i, int32_t pos, const seq_set & set);
    // K comes from elsewhere, with its dither.
    void set_dither(uint32_t i, uint8_t dither) { cells_[i].dither = dither; }
    // No sequence sees it any more: it becomes empty, unless a hold keeps it. precondition: it is not empty
    void drop(uint32_t i);
    // All at once, so that they may form cycles; without memory for that, std::bad_alloc with nothing changed.
    // precondition: sources are not empty; a destination is empty or itself a source
    void move(const std::vector<cell_move> & moves);
    // Its row is about to be written, whether or not the cell will be used.
    void touch(uint32_t i) { n_touched_ = n_touched_ > i ? n_touched_ : i + 1; }
    // The sequence leaves a shared cell for a copy of its own, with the same position and pending shift. precondition: dst is empty
    void fork(uint32_t src, uint32_t dst, uint32_t seq) noexcept;
    // Holds are released too.
    void clear();
    // K was rotated to the cell's position and carries this dither now. The cell's K-shift is no longer pending.
    void set_rotated(uint32_t i, uint8_t dither);

    // What a caller may do to sequences: ranges [p0, p1), negative p0 = 0, negative p1 = no end. Any integer is safe: an id out of
    // range, d < 1 or a position past 2^31 - 1 throws error(KVG_INVALID_ARGUMENT) with nothing changed.
    void seq_rm(int64_t seq, int64_t p0, int64_t p1);
    void seq_cp(int64_t src, int64_t dst, int64_t p0, int64_t p1);
    void seq_keep(int64_t seq);
    // seq_add and seq_div, in two halves: checked, then done. Between them the shared cells among those that change their position
    // must be forked, since a position is a property of the cell.
    reposition check_add(int64_t seq, int64_t p0, int64_t p1, int64_t delta) const;
    reposition check_div(int64_t seq, int64_t p0, int64_t p1, int64_t d) const;
    std::vector<uint32_t> shared_in(const reposition & change) const;
    // precondition: shared_in(change) is empty
    void apply(const reposition & change);

    // Holds of cells that a sequence sees: they stay as they are, whatever becomes of the sequence, until release() or clear(). Any
    // integer is safe, as above.
    // The sequence must see every position of the range. precondition: no hold has that id
    hold_range hold(int64_t id, int64_t seq, int64_t p0, int64_t p1);
    // The sequence sees them too. It must end just before the hold begins.
    void attach(int64_t hold, int64_t seq);
    void release(int64_t hold);

    // Empty cells, for content that is written before anybody sees it: they get its positions, and stay where they are until show() or
    // give_back(), or clear(). precondition: the cells are empty, and nothing can be asked of them twice
    void reserve(const std::vector<uint32_t> & empty, const int32_t * positions, const uint8_t * dithers);
    // The sequence sees reserved cells. precondition: they are reserved
    void show_reserved(const std::vector<uint32_t> & reserved, int64_t seq);
    // Reserved cells are empty again. precondition: they are reserved
    void give_back(const std::vector<uint32_t> & reserved);

    // What must be so after every call; throws error(KVG_INTERNAL) with the first thing that doesn't.
    void check() const;

private:
    struct held_cells {
        int64_t p0;
        int64_t p1;
        std::vector<uint32_t> ids; // by position
    };

    uint64_t * words(uint32_t i) { return seq_.data() + std::size_t{i} * n_words_; }
    uint32_t check_seq(int64_t seq, const char * what) const;
    bool affects(const reposition & change, uint32_t i) const;
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
    const pos_index::order & order_of(uint32_t seq) const;
    void check_holds() const;

    uint32_t n_seq_max_;
    uint32_t n_words_;
    uint32_t n_used_ = 0;
    uint32_t n_kv_ = 0;
    uint32_t n_touched_ = 0;
    uint32_t n_shifted_ = 0;
    uint64_t shift_version_ = 0;
    std::vector<cell> cells_;
    std::vector<uint64_t> seq_;                     // (n_cells, n_words): who sees each cell
    mutable std::vector<seq_extent> extents_;       // of each sequence; made tight when somebody asks
    std::vector<uint32_t> place_;                   // the cell that has an id; ids are a permutation of the cells
    mutable pos_index index_;                       // filled when somebody asks
    std::unordered_map<int64_t, held_cells> holds_; // by id
};

} // namespace kvg
