#include "runtime/upkeep.h"

#include <algorithm>
#include <chrono>

#include "error.h"
#include "memory/aging.h"
#include "memory/defrag_plan.h"
#include "memory/move.h"
#include "memory/slots.h"
#include "shift/settle.h"

namespace kvg {

namespace {

// Adds the graphs that run while it lives, and the time, to some stats.
class stopwatch {
public:
    stopwatch(const kv_cache & cache, kvg_update_stats & stats)
        : cache_(cache), stats_(stats), graphs_(cache.n_graphs()), start_(std::chrono::steady_clock::now()) {}
    ~stopwatch() {
        stats_.graphs += cache_.n_graphs() - graphs_;
        stats_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }
    stopwatch(const stopwatch &) = delete;
    stopwatch & operator=(const stopwatch &) = delete;

private:
    const kv_cache & cache_;
    kvg_update_stats & stats_;
    int64_t graphs_;
    std::chrono::steady_clock::time_point start_;
};

// Cells whose rows are alike change places: all of a group, or fresh ones, and then old ones.
std::vector<cell_span> spans_of(const kv_group & group) {
    const uint32_t n_fresh = group.n_fresh();
    return n_fresh == 0 ? std::vector<cell_span>{ALL_CELLS}
                        : std::vector<cell_span>{{0, n_fresh}, {n_fresh, group.cells().size() - n_fresh}};
}

// Adds the cells that it moves to the stats.
void compact(kv_group & group, int32_t policy, kvg_update_stats & stats) {
    for (const cell_span & among : spans_of(group)) {
        size_t n_moved = 0;
        if (policy == KVG_DEFRAG_SORT) {
            const auto steps = plan_sort(group.cells(), sort_ranks(group), among);
            run_sort(group, steps);
            for (const std::vector<cell_move> & step : steps) {
                n_moved += step.size();
            }
        } else if (policy == KVG_DEFRAG_FILL) {
            const std::vector<cell_move> moves = plan_fill(group.cells(), among);
            run_fill(group, moves);
            n_moved = moves.size();
        }
        stats.moved_cells += static_cast<int64_t>(n_moved);
        stats.moved_bytes += static_cast<int64_t>(n_moved * (among.begin > 0 ? group.old_cell_bytes() : group.cell_bytes()));
    }
}

// How many cells a group needs for copies, and from which sequence none may be taken for them.
struct copy_need {
    uint32_t n;
    uint32_t kept;
};

// Where a window needs room for copies, the sequence loses what it has left behind, unless it is going to need that; others lose theirs in
// any case.
copy_need need_of(const cells & cells, const reposition & change) {
    const std::vector<uint32_t> shared = cells.shared_in(change);
    const auto n_shared = static_cast<uint32_t>(shared.size());
    if (n_shared <= cells.size() - cells.n_used() || !cells.reuses() || !cells.may_lose(change)) {
        return {n_shared, change.seq};
    }
    const std::vector<uint32_t> own = cells.own_holds(change.seq);
    const auto is_copied = [&](uint32_t i) {
        return cells.pos(i) > cells.left_behind(change.seq) || (!own.empty() && own[i] > 0);
    };
    return {static_cast<uint32_t>(std::count_if(shared.begin(), shared.end(), is_copied)), cells::NOBODY};
}

// error(KVG_CACHE_FULL). Where a window has no room for copies, checkpoints are dropped first; before others those that the change leaves
// behind, whose holds are `unmoved`.
void require_copies(kv_cache & cache, const cells & cells, const reposition & change, const std::vector<int64_t> & unmoved,
                    const char * op) {
    copy_need need = need_of(cells, change);
    while (cells.reuses() && need.n > cells.n_available(need.kept) && (cache.drop_those(unmoved) || cache.drop_least())) {
        need = need_of(cells, change);
    }
    require_room(cells, need.n, op, need.kept);
    if (cells.n_fresh() > 0) {
        find_copies(cells, cells.shared_in(change), op);
    }
}

// From shared cells to empty ones, in one group.
std::vector<cell_move> plan_copies(cells & cells, const reposition & change, const char * op) {
    std::vector<uint32_t> shared = cells.shared_in(change);
    if (shared.size() > cells.size() - cells.n_used() && cells.reuses() && cells.may_lose(change)) {
        cells.lose(change.seq, cells.left_behind(change.seq));
        shared = cells.shared_in(change);
    }
    std::vector<cell_move> copies;
    if (!shared.empty()) {
        const std::vector<uint32_t> slots = cells.n_fresh() > 0
                                                ? find_copies(cells, shared, op)
                                                : find_slots(cells, static_cast<uint32_t>(shared.size()), op, change.seq);
        shared = cells.shared_in(change); // less, where a window took cells from those who shared them
        for (size_t i = 0; i < shared.size(); ++i) {
            copies.push_back({shared[i], slots[i]});
        }
    }
    return copies;
}

} // namespace

upkeep::upkeep(const model & model, kv_cache & cache, const backends & backends, bool can_wait, int n_threads,
               float defrag_threshold)
    : cache_(cache), backends_(backends), learned_positions_(model.hparams().learned_positions), can_wait_(can_wait),
      n_threads_(n_threads), defrag_threshold_(defrag_threshold) {
    for (kv_group & group : cache.groups()) {
        groups_.emplace_back(group, model);
    }
}

void upkeep::require_intact() const {
    if (cache_.broken()) {
        fail(KVG_DEVICE,
             "an earlier update or load failed half way, so K and V can't be trusted: clear() the cache and decode again");
    }
}

void upkeep::request_defrag(int32_t policy) {
    if (policy != KVG_DEFRAG_FILL && policy != KVG_DEFRAG_SORT) {
        fail(KVG_INVALID_ARGUMENT, "no defrag policy has number %d; there are fill (0) and sort (1)", policy);
    }
    defrag_pending_ = policy;
}

void upkeep::clear(bool data) {
    cache_.clear(data);
    defrag_pending_ = NO_DEFRAG;
}

void upkeep::require_movable(const char * op) const {
    if (learned_positions_) {
        fail(KVG_UNSUPPORTED,
             "%s: this model has learned an embedding of each position, and K and V are made with it; no rotation moves them. "
             "Remove what stands there, and decode it again at its new positions",
             op);
    }
}

void upkeep::seq_add(int64_t seq, int64_t p0, int64_t p1, int64_t delta) {
    require_movable("seq_add");
    std::vector<kvg::reposition> changes;
    for (const kv_group & group : cache_.groups()) {
        changes.push_back(group.cells().check_add(seq, p0, p1, delta));
    }
    reposition(changes, "seq_add");
}

void upkeep::seq_div(int64_t seq, int64_t p0, int64_t p1, int64_t d) {
    require_movable("seq_div");
    std::vector<kvg::reposition> changes;
    for (const kv_group & group : cache_.groups()) {
        changes.push_back(group.cells().check_div(seq, p0, p1, d));
    }
    reposition(changes, "seq_div");
}

// A position is a property of the cell: those who share one keep it, and the sequence goes on with a copy. K and V are copied, in every
// group, before any cell or checkpoint changes; only what a window had no room for beside the copies is lost before.
void upkeep::reposition(const std::vector<kvg::reposition> & changes, const char * op) {
    std::vector<std::vector<cell_move>> copies;
    cache_.require_end(changes.front(), op);
    for (size_t g = 0; g < groups_.size(); ++g) {
        cache_.groups()[g].cells().require_window(changes[g], op);
    }
    const std::vector<int64_t> unmoved = cache_.unmoved(changes.front());
    for (const bool reuses : {false, true}) { // so that no checkpoint is dropped for what is refused then
        for (size_t g = 0; g < groups_.size(); ++g) {
            if (cache_.groups()[g].cells().reuses() == reuses) {
                require_copies(cache_, cache_.groups()[g].cells(), changes[g], unmoved, op);
            }
        }
    }
    for (size_t g = 0; g < groups_.size(); ++g) {
        copies.push_back(plan_copies(cache_.groups()[g].cells(), changes[g], op));
    }
    for (size_t g = 0; g < groups_.size(); ++g) {
        if (!copies[g].empty()) {
            require_intact();
            kv_group & group = cache_.groups()[g];
            for (const cell_move & copy : copies[g]) {
                group.cells().touch(copy.dst);
            }
            backends_.set_threads(n_threads_);
            make_plain(g, copies[g]);
            run_copy(group, copies[g]);
        }
    }
    for (size_t g = 0; g < groups_.size(); ++g) {
        cells & cells = cache_.groups()[g].cells();
        for (const cell_move & copy : copies[g]) {
            cells.fork(copy.src, copy.dst, changes[g].seq);
        }
        cells.apply(changes[g]);
    }
    cache_.drop_those(unmoved);
    cache_.move_checkpoints(changes.front());
}

// Settles all cells whose K-shift is pending, and rotates K of those that don't wait.
void upkeep::settle_all(kvg_update_stats & stats) {
    for (size_t g = 0; g < groups_.size(); ++g) {
        group_state & state = groups_[g];
        const kv_group & group = cache_.groups()[g];
        state.settled = NOT_SETTLED; // until all is done
        const settlement settled = settle(group.cells(), can_wait_);
        state.shift.run(n_threads_, settled.rotated);
        state.waiting.emplace(group, settled.waiting);
        state.settled = group.cells().shift_version();
        stats.shifted_cells += static_cast<int64_t>(settled.rotated.rows.size());
    }
}

void upkeep::tell_waiting(decoder & decoder) {
    if (decoder.can_rotate_queries()) {
        decoder.set_waiting([this](uint32_t layer) { return waiting(layer); });
    }
}

attend_rotations upkeep::waiting(uint32_t layer) {
    group_state & state = groups_[cache_.group_index_of(layer)];
    return state.waiting ? state.waiting->of(state.layers[cache_.owner_of(layer)]) : attend_rotations{};
}

// policies: of each group
void upkeep::compact_all(const std::vector<int32_t> & policies, kvg_update_stats & stats) {
    for (size_t g = 0; g < groups_.size(); ++g) {
        compact(cache_.groups()[g], policies[g], stats);
    }
}

// Before rows of fresh cells move to old ones, K is rotated to the cells' positions, without dither: the number of a dither is about the
// type that K was rounded to.
void upkeep::make_plain(size_t g, const std::vector<cell_move> & moves) {
    const uint32_t n_fresh = cache_.groups()[g].n_fresh();
    std::vector<uint32_t> aging;
    for (const cell_move & m : moves) {
        if (m.src < n_fresh && m.dst >= n_fresh) {
            aging.push_back(m.src);
        }
    }
    groups_[g].shift.run(n_threads_, settle_plain(cache_.groups()[g].cells(), aging));
}

// In every group whose rows age, until n fresh cells are empty.
void upkeep::age_all(uint32_t n, kvg_update_stats & stats) {
    bool have_aged = false;
    for (size_t g = 0; g < groups_.size(); ++g) {
        kv_group & group = cache_.groups()[g];
        const std::vector<cell_move> moves = group.ages() ? plan_aging(group.cells(), n) : std::vector<cell_move>();
        if (moves.empty()) {
            continue;
        }
        const stopwatch timed(cache_, stats);
        make_plain(g, moves);
        for (const cell_move & m : moves) {
            group.cells().touch(m.dst);
        }
        run_aging(group, moves);
        groups_[g].settled = NOT_SETTLED;
        stats.aged_cells += static_cast<int64_t>(moves.size());
        have_aged = true;
    }
    if (have_aged) {
        const stopwatch timed(cache_, stats);
        settle_all(stats); // which cells may wait depends on where they lie
    }
}

bool upkeep::is_pending(const std::vector<int32_t> & policies) const {
    for (size_t g = 0; g < groups_.size(); ++g) {
        if (policies[g] != NO_DEFRAG || !is_settled(g)) {
            return true;
        }
    }
    return false;
}

bool upkeep::is_settled(size_t group) const { return cache_.groups()[group].cells().shift_version() == groups_[group].settled; }

void upkeep::flush(const std::vector<int32_t> & policies, uint32_t n_tokens, kvg_update_stats & stats) {
    require_intact();
    if (is_pending(policies)) { // not for nearly every token of a generation
        const stopwatch timed(cache_, stats);
        backends_.set_threads(n_threads_);
        compact_all(policies, stats);
        settle_all(stats); // which cells may wait depends on where they lie
    }
    age_all(n_tokens, stats);
    stats.waiting_cells = 0;
    for (const kv_group & group : cache_.groups()) {
        stats.waiting_cells += group.cells().n_shifted();
    }
}

kvg_update_stats upkeep::update() {
    kvg_update_stats stats = {};
    flush(std::vector<int32_t>(groups_.size(), defrag_pending_), 0, stats);
    defrag_pending_ = NO_DEFRAG;
    return stats;
}

void upkeep::before_decode(uint32_t n_tokens) {
    std::vector<int32_t> policies(groups_.size(), defrag_pending_);
    for (size_t g = 0; g < groups_.size() && defrag_pending_ == NO_DEFRAG; ++g) {
        const cells & cells = cache_.groups()[g].cells();
        const auto holes = static_cast<float>(count_holes(cells));
        const bool fragmented = defrag_threshold_ >= 0 && holes > defrag_threshold_ * static_cast<float>(cells.n_kv());
        policies[g] = fragmented ? int32_t{KVG_DEFRAG_FILL} : NO_DEFRAG;
    }
    flush(policies, n_tokens, flushed_);
    defrag_pending_ = NO_DEFRAG;
}

void upkeep::before_read() { flush(std::vector<int32_t>(groups_.size(), NO_DEFRAG), 0, flushed_); }

uint8_t upkeep::settle_alike(size_t group, const std::vector<uint32_t> & those) {
    before_read();
    const rotation_list list = kvg::settle_alike(cache_.groups()[group].cells(), those);
    if (!list.rows.empty()) {
        const stopwatch timed(cache_, flushed_);
        backends_.set_threads(n_threads_);
        groups_[group].shift.run(n_threads_, list);
        flushed_.shifted_cells += static_cast<int64_t>(list.rows.size());
    }
    uint8_t dither =
        0; // K as it was written may stand beside K that was rotated once: neither has a dither, and 1 is true of both
    for (const uint32_t i : those) {
        dither = std::max(dither, cache_.groups()[group].cells().dither(i));
    }
    return dither;
}

kvg_update_stats upkeep::take_stats() {
    const kvg_update_stats stats = flushed_;
    flushed_ = {};
    return stats;
}

bool upkeep::can_shift_on(ggml_backend_dev_t device) const {
    return std::all_of(groups_.begin(), groups_.end(), [&](const group_state & g) { return g.shift.is_on(device); });
}

} // namespace kvg
