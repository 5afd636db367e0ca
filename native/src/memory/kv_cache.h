// The cache of a context: all groups of cells. An operation on a sequence changes every group, or fails and changes none.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "memory/kv_group.h"
#include "memory/states.h"
#include "memory/working_rows.h"
#include "model/hparams.h"

namespace kvg {

// A position that a sequence can come back to.
struct checkpoint {
    uint32_t seq;
    int32_t p;    // of the next token
    int64_t hold; // of what windows need there
    int64_t used; // when; greater is later
};

// A state before position p.
struct kept_state {
    uint32_t row;
    int32_t p;
};

// Where a batch begins in a sequence.
struct first_position {
    uint32_t seq;
    int32_t pos;
};

// How many cells the groups have.
struct cache_size {
    uint32_t n_ctx;            // of a group that keeps every position
    uint32_t n_batch;          // most tokens that come at once
    uint32_t n_seq_max;        //
    uint64_t checkpoint_bytes; // of states, beside two for each sequence
    uint32_t checkpoint_cells; // of a window, beside what its sequences attend to
    bool swa_full;             // windows keep every position, too
    bool is_measured;          // the cache only measures memory; groups have a record of one cell
    uint32_t device_layers;    // whose rows a device has room for at a time, where its layers' cells are in host memory

    uint32_t of(const group_spec & spec) const;
    // Those of a group's rows: they age where every position is kept, and not all cells are fresh.
    cache_types types_of(const group_spec & spec, cache_types types) const;
    // states for checkpoints and resume points, beside two for each sequence
    uint32_t kept_states(const hparams & h) const;
    // whether cells that their sequences have left behind are reused
    bool reuses(const group_spec & spec) const { return spec.window > 0 && !swa_full; }
};

class kv_cache {
public:
    // Like kv_group, this takes no device memory yet. error(KVG_DEVICE), with the size needed and the size free, when a device has no room
    kv_cache(const hparams & h, const kv_homes & homes, const backends & backends, const cache_size & size,
             const cache_types & types);
    // Allocates K and V of every group. Call it once, and clear(true) before K and V are used. error(KVG_DEVICE)
    void allocate();

    class states & states() { return states_; }
    const class states & states() const { return states_; }
    // rising; layers with a state
    const std::vector<uint32_t> & state_layers() const { return state_layers_; }
    std::deque<kv_group> & groups() { return groups_; }
    const std::deque<kv_group> & groups() const { return groups_; }
    bool attends(uint32_t layer) const { return group_of_layer_[layer] != NO_GROUP; }
    // layer: its number in the model, of one that attends. One without K and V of its own is answered for by its owner.
    uint32_t owner_of(uint32_t layer) const { return owners_[layer]; }
    uint32_t group_index_of(uint32_t layer) const { return group_of_layer_[layer]; }
    const kv_group & group_of(uint32_t layer) const { return groups_[group_of_layer_[layer]]; }
    ggml_backend_dev_t device(uint32_t layer) const { return homes_.cells[owners_[layer]]; }
    // the device whose attention reads the layer's cells
    ggml_backend_dev_t reader(uint32_t layer) const { return homes_.readers[owners_[layer]]; }
    // nullptr: every layer's cells are read where they lie
    const working_rows * working() const { return working_.get(); }
    uint32_t n_layer() const { return static_cast<uint32_t>(owners_.size()); }
    // Tokens that can be decoded: empty cells of groups without a window. Without such groups also cells that may be reused, or that only
    // checkpoints keep.
    uint32_t n_free() const;
    uint32_t n_seq_max() const { return groups_.front().cells().n_seq_max(); }
    const cache_types & types() const { return groups_.front().types(); }
    // whether rows of any group age
    bool ages() const;
    // error(KVG_UNSUPPORTED) when they do. what: what wants rows of one type, for the message
    void require_one_type(const char * what) const;
    // rows of the group that has the most
    uint32_t max_rows() const;
    uint64_t bytes() const;
    // bytes of K, V and states on a device, and of working rows; the same before allocate()
    uint64_t bytes_on(ggml_backend_dev_t device) const;
    // of these, those in host memory that another device copies from and to directly
    uint64_t pinned_bytes_on(ggml_backend_dev_t device) const;
    // layers whose K and V are there
    uint32_t layers_on(ggml_backend_dev_t device) const;
    // bytes of K and V of one cell in every group together
    uint64_t cell_bytes() const;
    // graphs for K-shift, defrag and copies that were computed so far
    int64_t n_graphs() const;

    // As in `cells`, in every group. error(KVG_INVALID_ARGUMENT) when a sequence would end where a window has lost what its next token
    // attends to
    void seq_rm(int64_t seq, int64_t p0, int64_t p1);
    // The same of single positions, rising, before the sequence's last one, in one pass over the cells.
    void seq_rm_at(int64_t seq, const std::vector<int32_t> & positions);
    // Undoes the last step: each of its sequences loses what it got, and has its state again.
    void take_back(const std::vector<first_position> & decoded);
    void seq_cp(int64_t src, int64_t dst, int64_t p0, int64_t p1);
    void seq_keep(int64_t seq);
    // The lowest position from which on every group has all, and the highest; -1 when there are no cells. When a window has lost all
    // that the next token attends to, the first is beyond the second.
    int32_t seq_pos_min(int64_t seq) const;
    int32_t seq_pos_max(int64_t seq) const;
    // the position after the last one that the sequence has, or has lost
    int64_t next_pos(int64_t seq) const;
    // cells of the sequence in the group that has the most of them
    uint32_t seq_n_cells(int64_t seq) const;

    // error(KVG_INVALID_ARGUMENT) when a window has lost what a token at this position of the sequence attends to
    void require_seen(uint32_t seq, int32_t pos) const;
    // error(KVG_UNSUPPORTED) when a window has lost what a token sees that is decoded here, before the sequence's end; or for a state
    void require_repair(uint32_t seq, int32_t pos) const;
    seq_count count(int64_t seq, int64_t p0, int64_t p1) const;
    // One hold in every group that keeps every position, under one id, which is never used again.
    hold_range hold(int64_t seq, int64_t p0, int64_t p1);
    void attach(int64_t hold, int64_t seq, int64_t p1 = -1);
    void release(int64_t hold);
    // error(KVG_INVALID_ARGUMENT) when there is no hold, and no resume point, with this id
    void require_hold(int64_t hold) const;

    // What windows need in front of position p of a sequence (below 0: where it ends), kept whatever becomes of it: a hold like the others,
    // for attach() as the last of them and release(). p0 and p1 are the position. error(KVG_INVALID_ARGUMENT) when the sequence is empty, or
    // can't go on there
    hold_range resume_point(int64_t seq, int64_t p = -1);
    // The same, kept for the sequence and moved with it, until something is put or taken before that position or a window needs the room.
    // Returns the position.
    int32_t keep_checkpoint(int64_t seq);
    std::vector<int32_t> checkpoints(int64_t seq) const;
    // Of each of them, in that order, the highest position that it has not in a group; -1: none.
    void checkpoints_lost(int64_t seq, size_t group, int32_t * out) const;
    // One whose cells have been loaded. hold: of its cells, with an id from new_hold()
    void add_checkpoint(int64_t seq, int32_t p, int64_t hold);
    // So that n calls of add_checkpoint() can't fail.
    void reserve_checkpoints(size_t n) { checkpoints_.reserve(checkpoints_.size() + n); }
    // Holds what a checkpoint needs before position `next`, inside a text. row: of its state, unless layers have none. Returns the id
    int64_t hold_at(uint32_t seq, int32_t next, uint32_t row);
    // Releases it in every group that has it.
    void drop_hold(int64_t hold) { release_in_all(hold); }
    int64_t new_hold() { return next_hold_++; }
    // Of each checkpoint of a sequence, in rising order of positions. precondition: layers have states
    std::vector<uint32_t> checkpoint_states(int64_t seq) const;
    // those of checkpoints and resume points
    std::vector<kept_state> kept_states() const;
    // Goes back to the largest position up to p where the sequence can go on, 0 if there is none, and returns it.
    int32_t rewind(int64_t seq, int64_t p);
    // Drops checkpoints until n rows for states are free; none where all of them would be too few. Returns whether n are free.
    bool require_states(uint32_t n);
    // error(KVG_CACHE_FULL) when a group has no room for n[group] cells. Where a window has none, checkpoints are dropped first, unless all
    // of them would be too few.
    void require_cells(const std::vector<uint32_t> & n, const char * what);
    // The holds of checkpoints that make way for n[group] cells in `next`, copies of the groups' cells, and for n_states rows once the
    // sequence (as in states::n_free_without) has none. `next` is then without them. Empty where all checkpoints would be too few, or
    // none has to go.
    std::vector<int64_t> making_way(std::vector<cells> & next, const std::vector<uint32_t> & n, uint32_t n_states,
                                    int64_t seq) const;
    // copies of the cells of every group
    std::vector<cells> copy_cells() const;
    // Drops the checkpoint that is least useful. Returns whether there was any.
    bool drop_least();
    // Drops those of a sequence (below 0: of all) at positions after p0 and before p1, which are of another text when something was removed
    // there, or comes there.
    void drop_within(int64_t seq, int64_t p0, int64_t p1);
    // The same for single positions, rising, that are removed.
    void drop_within(uint32_t seq, const std::vector<int32_t> & positions);
    // Drops those of a sequence that would bring back what it had at a position, now that it has another cell there.
    void drop_over(uint32_t seq, int32_t pos);
    // The holds of those of the sequence that can't move with it: what their windows would need is lost, or something would pass them.
    std::vector<int64_t> unmoved(const reposition & change) const;
    // Drops checkpoints with these holds, as far as they are there. Returns whether any was. Doesn't fail.
    bool drop_those(const std::vector<int64_t> & holds);
    // Cells came to a sequence (below 0: to all) from elsewhere, and nobody knows the state at its end.
    void forget_states(int64_t seq);
    // After cells were removed: a sequence without cells begins with zeros, and a checkpoint without cells before it leads nowhere.
    void settle_states();
    // error(KVG_UNSUPPORTED) when a sequence with a state would lose its last tokens, and no others
    void require_end(const reposition & change, const char * op) const;
    // The others get their new positions, once the cells of every group have.
    void move_checkpoints(const reposition & change);

    // Calls kv_group::clear() for each group.
    void clear(bool data);
    // whether any group is broken()
    bool broken() const;

private:
    void require_return(uint32_t seq, int64_t p0, int64_t p1) const;
    void remove(int64_t seq, int64_t p0, int64_t p1);
    bool ends_at(uint32_t seq, int64_t p0) const;
    bool ends_before(uint32_t seq, int64_t p0, int64_t p1) const;
    bool holds_in(const kv_group & group) const;
    bool release_in_all(int64_t hold);
    bool has_state(uint32_t seq, int64_t pos) const;
    bool can_go_on(uint32_t seq, int64_t pos) const;
    std::vector<checkpoint> checkpoints_of(int64_t seq) const;
    int32_t standing(int64_t seq) const;
    int64_t hold_end(int64_t seq, int32_t next, bool is_checkpoint);
    void hold_place(int64_t id, int64_t seq, int32_t next, uint32_t row, bool is_checkpoint);
    void require_copy(uint32_t src, uint32_t dst, int64_t p0, int64_t p1) const;
    void copy_state(uint32_t src, uint32_t dst, int64_t p0, int64_t p1);
    bool had_any(uint32_t seq, int64_t p0, int64_t p1) const;
    void restore_hold(int64_t hold, uint32_t seq);
    void attach_point(int64_t hold, int32_t p, int64_t seq);
    bool copies_all(uint32_t src, int64_t p0, int64_t p1) const;
    int64_t reaches(const checkpoint & c) const;
    void restore(uint32_t seq, int64_t p);
    bool moves_along(const checkpoint & c, const reposition & change) const;
    template <class F> void drop_if(F is_over);
    const checkpoint * find_checkpoint(uint32_t seq, int64_t p) const;
    void drop_hopeless();
    uint32_t n_available(const cells & cells) const;

    class states states_;
    kv_homes homes_;
    std::vector<uint32_t> group_of_layer_;
    std::vector<uint32_t> state_layers_;
    std::vector<uint32_t> owners_; // of each layer's K and V
    int64_t next_hold_ = 1;
    std::map<int64_t, int32_t> resume_points_; // their positions, by the id of the hold
    std::vector<checkpoint> checkpoints_;
    int64_t n_used_ = 0;          // of checkpoints so far
    std::deque<kv_group> groups_; // a deque, because other objects keep references to them
    std::unique_ptr<working_rows> working_;
};

} // namespace kvg
