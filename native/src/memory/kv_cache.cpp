#include "memory/kv_cache.h"

#include <algorithm>
#include <functional>
#include <map>

#include "device.h"
#include "error.h"

namespace kvg {

// Rows for n_cells, padded.
static uint32_t padded(uint32_t n_cells) { return (n_cells + MAX_SPAN_ALIGN - 1) / MAX_SPAN_ALIGN * MAX_SPAN_ALIGN; }

uint32_t cache_size::of(const group_spec & spec) const {
    if (is_measured) {
        return 1;
    }
    const uint64_t bounded = uint64_t{n_seq_max} * spec.window + n_batch + checkpoint_cells;
    return reuses(spec) && bounded < n_ctx ? static_cast<uint32_t>(bounded) : n_ctx;
}

cache_types cache_size::types_of(const group_spec & spec, cache_types types) const {
    if (spec.window > 0 || types.n_fresh >= n_ctx) {
        types.n_fresh = 0;
    }
    return types;
}

// Refuses a cache that the devices or the host can't hold: a kernel that overcommits would kill the process later, when the memory is
// touched.
static void require_room(const hparams & h, const kv_homes & homes, const cache_size & size, const cache_types & types,
                         const state_rows & states) {
    std::map<ggml_backend_dev_t, uint64_t> needed = {{cpu_device(), states.bytes_on(cpu_device())}};
    for (ggml_backend_dev_t device : homes.states) {
        needed[device] = states.bytes_on(device);
    }
    for (const group_spec & spec : h.groups) {
        needed[cpu_device()] += size.of(spec) * cells::bytes_per_cell(size.n_seq_max);
        const uint64_t of_layer = layer_bytes(spec, size.types_of(spec, types), padded(size.of(spec)));
        for (const uint32_t il : spec.layers) {
            uint64_t & bytes = needed[homes.cells[il]];
            if (__builtin_add_overflow(bytes, of_layer, &bytes)) {
                bytes = UINT64_MAX;
            }
        }
    }
    for (const auto & [device, bytes] : needed) {
        if (!has_room(device, bytes)) {
            fail(KVG_DEVICE,
                 "a cache of %u cells needs %s on %s and %s are free; use a smaller n_ctx or smaller types of K and V%s%s",
                 size.n_ctx, format_bytes(bytes).c_str(), ggml_backend_dev_name(device),
                 format_bytes(device_memory(device).free).c_str(),
                 is_cpu(device) ? "" : ", or kv_tier=\"auto\" (-kvt auto), which keeps in host memory what does not fit there",
                 states.bytes_on(device) > 0 ? ", or for recurrent states a smaller n_seq_max or checkpoint_bytes" : "");
        }
    }
}

// As many as fit; never so many that their number overflows.
uint32_t cache_size::kept_states(const hparams & h) const {
    const uint64_t row_bytes = std::max<uint64_t>(h.state_floats() * sizeof(float), 1);
    return static_cast<uint32_t>(std::min<uint64_t>(checkpoint_bytes / row_bytes, 1 << 20));
}

kv_cache::kv_cache(const hparams & h, const kv_homes & homes, const backends & backends, const cache_size & size,
                   const cache_types & types)
    : states_(h.layers, homes.states, size.n_seq_max, size.kept_states(h)), homes_(homes) {
    for (const layer_spec & layer : h.layers) {
        if (layer.recurs()) {
            state_layers_.push_back(static_cast<uint32_t>(owners_.size()));
        }
        group_of_layer_.push_back(layer.attends() ? layer.group : NO_GROUP);
        owners_.push_back(layer.kv_from);
    }
    if (!size.is_measured) {
        require_room(h, homes, size, types, states_.rows());
    }
    cache_size real = size;
    real.is_measured = false; // tensors that are measured are as large as they would be
    for (const group_spec & spec : h.groups) {
        groups_.emplace_back(spec, homes, backends, size.of(spec), padded(real.of(spec)), size.n_seq_max,
                             size.types_of(spec, types), size.reuses(spec));
    }
    if (homes.cells != homes.readers) {
        working_ = std::make_unique<working_rows>(h, homes, groups_, size.device_layers);
    }
    for (ggml_backend_dev_t device : working_ && !size.is_measured ? working_->devices() : std::vector<ggml_backend_dev_t>()) {
        if (!has_room(device, working_->bytes_on(device))) {
            fail(KVG_DEVICE,
                 "the rows of %u layers need %s on %s and %s are free; use a smaller n_ctx, smaller types of K and V or fewer "
                 "device_layers",
                 size.device_layers, format_bytes(working_->bytes_on(device)).c_str(), ggml_backend_dev_name(device),
                 format_bytes(device_memory(device).free).c_str());
        }
    }
}

void kv_cache::allocate() {
    states_.allocate();
    for (kv_group & group : groups_) {
        group.allocate();
    }
    if (working_) {
        working_->allocate();
    }
}

uint32_t kv_cache::n_free() const {
    uint32_t n = UINT32_MAX;
    for (const kv_group & group : groups_) {
        if (!group.cells().reuses()) {
            n = std::min(n, group.cells().n_available());
        } else if (groups_.front().cells().reuses()) {
            n = std::min(n, n_available(group.cells()));
        }
    }
    return n;
}

bool kv_cache::ages() const {
    return std::any_of(groups_.begin(), groups_.end(), [](const kv_group & group) { return group.ages(); });
}

void kv_cache::require_one_type(const char * what) const {
    if (ages()) {
        fail(KVG_UNSUPPORTED,
             "%s: rows of one type are wanted, and those of this cache have two, by their age; open the context with one "
             "type for K and one for V, as in type_k=\"f16\"",
             what);
    }
}

uint32_t kv_cache::max_rows() const {
    uint32_t n = 0;
    for (const kv_group & group : groups_) {
        n = std::max(n, group.n_rows());
    }
    return n;
}

uint64_t kv_cache::bytes() const {
    uint64_t bytes = states_.row_bytes() * states_.n_rows();
    for (const kv_group & group : groups_) {
        bytes += group.bytes();
    }
    return bytes;
}

uint64_t kv_cache::bytes_on(ggml_backend_dev_t device) const {
    uint64_t bytes = states_.rows().bytes_on(device) + (working_ ? working_->bytes_on(device) : 0);
    for (const kv_group & group : groups_) {
        bytes += group.bytes_on(device);
    }
    return bytes;
}

uint64_t kv_cache::pinned_bytes_on(ggml_backend_dev_t device) const {
    uint64_t bytes = 0;
    for (const kv_group & group : groups_) {
        bytes += group.pinned_bytes_on(device);
    }
    return bytes;
}

uint32_t kv_cache::layers_on(ggml_backend_dev_t device) const {
    uint32_t n = 0;
    for (uint32_t il = 0; il < n_layer(); ++il) {
        n += attends(il) && owners_[il] == il && homes_.cells[il] == device;
    }
    return n;
}

uint64_t kv_cache::cell_bytes() const {
    uint64_t bytes = 0;
    for (const kv_group & group : groups_) {
        bytes += group.cell_bytes();
    }
    return bytes;
}

int64_t kv_cache::n_graphs() const {
    int64_t n = 0;
    for (const kv_group & group : groups_) {
        n += group.n_graphs();
    }
    return n;
}

// Whether removing all from p0 on leaves the sequence nothing: the first group keeps every position, if any does.
bool kv_cache::ends_at(uint32_t seq, int64_t p0) const {
    const cells & first = groups_.front().cells();
    return p0 <= 0 || (!first.reuses() && first.seq_pos_min(seq) >= p0);
}

void kv_cache::require_seen(uint32_t seq, int32_t pos) const {
    if (!has_state(seq, pos)) {
        const checkpoint * kept = find_checkpoint(seq, pos);
        fail(KVG_INVALID_ARGUMENT,
             "sequence %u can't go on at position %d: nobody has kept the state of the recurrent layers there. "
             "The nearest position from which it can go on is %d (%s); "
             "keep states with kv.checkpoint() or kv.resume_point()",
             seq, pos, kept ? std::min(kept->p, pos) : 0, kept ? "a checkpoint, for kv.rewind" : "decoding everything again");
    }
    for (const kv_group & group : groups_) {
        const cells & cells = group.cells();
        if (!cells.can_go_on(seq, pos)) {
            const checkpoint * kept = find_checkpoint(seq, pos);
            fail(KVG_INVALID_ARGUMENT,
                 "sequence %u can't go on at position %d: a window of %u positions has lost those up to %d. "
                 "The nearest positions from which it can go on are %d (%s) and %lld; "
                 "attach a kv.resume_point() that was made at this position, or open the context with swa_full=True",
                 seq, pos, group.spec().window, cells.lost(seq), kept ? std::min(kept->p, pos) : 0,
                 kept ? "a checkpoint, for kv.rewind" : "decoding everything again",
                 static_cast<long long>(int64_t{cells.lost(seq)} + group.spec().window));
        }
    }
}

void kv_cache::require_repair(uint32_t seq, int32_t pos) const {
    if (states_.any()) {
        fail(KVG_UNSUPPORTED,
             "sequence %u can't be repaired at position %d: its recurrent layers have read on up to position %lld, and a state "
             "can't be changed afterwards. Go back to a checkpoint before it (kv.rewind), and decode again from there",
             seq, pos, static_cast<long long>(next_pos(seq) - 1));
    }
    for (const kv_group & group : groups_) {
        const cells & cells = group.cells();
        if (!cells.can_go_on(seq, pos)) {
            fail(KVG_UNSUPPORTED,
                 "sequence %u can't be repaired at position %d: a token there sees positions from %d on in a window of %u, "
                 "which has lost those up to %d. Open the context with swa_full=True to keep every position",
                 seq, pos, cells.first_seen(pos), group.spec().window, cells.lost(seq));
        }
    }
}

// Refuses a removal after which the sequence would end where it can't go on, also with a checkpoint's help.
void kv_cache::require_return(uint32_t seq, int64_t p0, int64_t p1) const {
    if (ends_before(seq, p0, p1) && !can_go_on(seq, p0)) {
        const checkpoint * found = find_checkpoint(seq, p0);
        if (!found || found->p < p0) {
            require_seen(seq, static_cast<int32_t>(p0));
        }
    }
}

// Whether a removal takes the end of a sequence and leaves it something.
bool kv_cache::ends_before(uint32_t seq, int64_t p0, int64_t p1) const {
    if (p0 <= 0) {
        return false;
    }
    const int64_t last = next_pos(seq) - 1;
    const bool to_the_end = p1 < 0 || p1 > last;
    return to_the_end && p0 <= last && !ends_at(seq, p0);
}

// The arguments are the same for every group, so the first group refuses what any would.
void kv_cache::seq_rm(int64_t seq, int64_t p0, int64_t p1) {
    for (uint32_t s = 0; s < n_seq_max(); ++s) {
        if (seq < 0 || seq == s) {
            require_return(s, p0, p1);
        }
    }
    for (uint32_t s = 0; s < n_seq_max(); ++s) {
        if ((seq < 0 || seq == s) && ends_before(s, p0, p1)) {
            restore(s, p0);
        }
    }
    remove(seq, p0, p1);
}

void kv_cache::remove(int64_t seq, int64_t p0, int64_t p1) {
    drop_within(seq, p0, p1);
    for (kv_group & group : groups_) {
        group.cells().seq_rm(seq, p0, p1);
    }
    settle_states();
}

void kv_cache::seq_rm_at(int64_t seq, const std::vector<int32_t> & positions) {
    const int64_t last = seq_pos_max(seq);
    if (positions.empty()) {
        return;
    }
    if (std::adjacent_find(positions.begin(), positions.end(), std::greater_equal<>()) != positions.end() ||
        positions.front() < 0 || positions.back() >= last) {
        fail(KVG_INVALID_ARGUMENT,
             "positions must rise, and come before the last one of sequence %lld, %lld; use seq_rm for the end",
             static_cast<long long>(seq), static_cast<long long>(last));
    }
    drop_within(static_cast<uint32_t>(seq), positions);
    for (kv_group & group : groups_) {
        group.cells().seq_rm_at(seq, positions);
    }
    settle_states();
}

void kv_cache::take_back(const std::vector<first_position> & decoded) {
    for (const first_position & first : decoded) {
        remove(first.seq, first.pos, -1);
    }
    states_.undo();
}

void kv_cache::require_end(const reposition & change, const char * op) const {
    const int64_t last = seq_pos_max(change.seq);
    if (states_.any() && last >= 0 && change.after(last) < 0 && groups_.front().cells().seq_pos_min(change.seq) < change.p0) {
        fail(KVG_UNSUPPORTED,
             "%s would move the last positions of sequence %u below 0, and no state is kept where it would end then; use "
             "kv.seq_rm or kv.rewind",
             op, change.seq);
    }
}

void kv_cache::settle_states() {
    if (!states_.any()) {
        return;
    }
    for (uint32_t s = 0; s < n_seq_max(); ++s) {
        if (states_.row_of(s) != states::NO_ROW && seq_pos_max(s) < 0) {
            states_.set(s, states::NO_ROW);
        }
    }
    drop_hopeless();
}

bool kv_cache::copies_all(uint32_t src, int64_t p0, int64_t p1) const {
    return p0 <= std::max(groups_.front().cells().seq_pos_min(src), 0) && (p1 < 0 || p1 >= next_pos(src));
}

// Whether a sequence has, or has lost, anything in a range.
bool kv_cache::had_any(uint32_t seq, int64_t p0, int64_t p1) const {
    return std::any_of(groups_.begin(), groups_.end(), [&](const kv_group & group) {
        return group.cells().has_any(seq, p0, p1) || group.cells().has_lost(seq, p0, p1);
    });
}

// A state is of a whole text: what is copied must begin where it does, and end where a state is kept.
void kv_cache::require_copy(uint32_t src, uint32_t dst, int64_t p0, int64_t p1) const {
    if (!states_.any()) {
        return;
    }
    if (next_pos(dst) > 0) {
        fail(KVG_INVALID_ARGUMENT,
             "sequence %u has a text of its own, and layers with a state can't join it with another: remove it first "
             "(kv.seq_rm)",
             dst);
    }
    if (!copies_all(src, p0, p1)) {
        const checkpoint * found = copies_all(src, p0, -1) ? find_checkpoint(src, p1) : nullptr;
        if (!found || found->p != p1) {
            const std::string nearest = found ? strformat(", whose nearest checkpoint before that is at %d", found->p) : "";
            fail(KVG_INVALID_ARGUMENT,
                 "layers with a state can be copied as a whole, or from the beginning up to a checkpoint; these are positions "
                 "%lld to %lld of sequence %u%s",
                 static_cast<long long>(p0), static_cast<long long>(p1), src, nearest.c_str());
        }
    }
}

// Once the cells are copied. What windows need where a checkpoint ends the copy, they may have left behind.
void kv_cache::copy_state(uint32_t src, uint32_t dst, int64_t p0, int64_t p1) {
    if (!states_.any()) {
        return;
    }
    if (copies_all(src, p0, p1)) {
        states_.set(dst, states_.row_of(src));
        return;
    }
    restore_hold(find_checkpoint(src, p1)->hold, dst);
}

// The sequence sees the cells that a checkpoint or a resume point keeps in windows, and has its state.
void kv_cache::restore_hold(int64_t hold, uint32_t seq) {
    for (kv_group & group : groups_) {
        if (group.cells().has_hold(hold)) {
            group.cells().restore_window(hold, seq);
        }
    }
    if (states_.has_hold(hold)) {
        states_.restore(hold, seq);
    }
}

void kv_cache::seq_cp(int64_t src, int64_t dst, int64_t p0, int64_t p1) {
    seq_pos_max(src), seq_pos_max(dst); // refuse what is no sequence
    if (src == dst || !had_any(static_cast<uint32_t>(src), p0, p1)) {
        return;
    }
    require_copy(static_cast<uint32_t>(src), static_cast<uint32_t>(dst), p0, p1);
    for (kv_group & group : groups_) {
        group.cells().seq_cp(src, dst, p0, p1);
    }
    drop_within(dst, p0, -1);
    copy_state(static_cast<uint32_t>(src), static_cast<uint32_t>(dst), p0, p1);
}

void kv_cache::seq_keep(int64_t seq) {
    for (kv_group & group : groups_) {
        group.cells().seq_keep(seq);
    }
    for (uint32_t s = 0; s < n_seq_max(); ++s) {
        if (s != seq) {
            drop_within(s, 0, -1);
        }
    }
    settle_states();
}

int32_t kv_cache::seq_pos_min(int64_t seq) const {
    int32_t greatest = -1;
    for (const kv_group & group : groups_) {
        const int32_t lowest = group.cells().seq_pos_min(seq);
        const int32_t lost = group.cells().lost(seq);
        greatest = std::max(greatest, lowest < 0 && lost >= 0 ? lost + 1 : lowest);
    }
    return greatest;
}

int32_t kv_cache::seq_pos_max(int64_t seq) const {
    int32_t highest = -1;
    for (const kv_group & group : groups_) {
        highest = std::max(highest, group.cells().seq_pos_max(seq));
    }
    return highest;
}

int64_t kv_cache::next_pos(int64_t seq) const {
    int64_t last = seq_pos_max(seq);
    for (const kv_group & group : groups_) {
        last = std::max<int64_t>(last, group.cells().lost(seq));
    }
    return last + 1;
}

uint32_t kv_cache::seq_n_cells(int64_t seq) const {
    uint32_t n = 0;
    for (const kv_group & group : groups_) {
        n = std::max(n, group.cells().extent(seq).n);
    }
    return n;
}

// The group that has the most.
seq_count kv_cache::count(int64_t seq, int64_t p0, int64_t p1) const {
    seq_count most = {0, 0};
    for (const kv_group & group : groups_) {
        const seq_count here = group.cells().count(seq, p0, p1);
        most = {std::max(most.n, here.n), std::max(most.n_shared, here.n_shared)};
    }
    return most;
}

// Of a model whose every layer has a window, a hold keeps no cells: it says which positions come before a resume point.
bool kv_cache::holds_in(const kv_group & group) const { return group.cells().reuses() == groups_.front().cells().reuses(); }

hold_range kv_cache::hold(int64_t seq, int64_t p0, int64_t p1) {
    const int64_t id = next_hold_++;
    hold_range range = {};
    for (kv_group & group : groups_) {
        try {
            range = holds_in(group) ? group.cells().hold(id, seq, p0, p1) : range;
        } catch (...) { // what one group refuses, or has no memory for, none has
            release_in_all(id);
            throw;
        }
    }
    return range;
}

// Texts are nowhere, so only places are compared; but a state tells that the sequence has a text of its own.
void kv_cache::attach_point(int64_t hold, int32_t p, int64_t seq) {
    if (const int64_t next = next_pos(seq); next != p) {
        fail(KVG_INVALID_ARGUMENT,
             "the resume point is at position %d and sequence %lld goes on at %lld: attach holds of all before it first", p,
             static_cast<long long>(seq), static_cast<long long>(next));
    }
    if (states_.has_hold(hold)) {
        const uint32_t row = states_.row_of(static_cast<uint32_t>(seq));
        if (row != states::NO_ROW && row != states_.held(hold)) {
            fail(KVG_INVALID_ARGUMENT,
                 "sequence %lld has decoded a text of its own up to position %d, and can go on with its own state there: "
                 "attach resume points where holds of all before them were attached to an empty sequence",
                 static_cast<long long>(seq), p);
        }
    }
    restore_hold(hold, static_cast<uint32_t>(seq));
}

void kv_cache::attach(int64_t hold, int64_t seq, int64_t p1) {
    if (const auto point = resume_points_.find(hold); point != resume_points_.end()) {
        attach_point(hold, point->second, seq);
        return;
    }
    const int64_t next = next_pos(seq);
    hold_range range = {};
    for (kv_group & group : groups_) {
        range = holds_in(group) ? group.cells().attach(hold, seq, p1) : range;
    }
    for (kv_group & group : groups_) { // windows have none of it
        if (!holds_in(group)) {
            group.cells().skip(seq, range.p0, range.p1);
        }
    }
    drop_within(seq, next, -1);
    forget_states(seq); // until a resume point is attached
}

void kv_cache::forget_states(int64_t seq) {
    for (uint32_t s = 0; states_.any() && s < n_seq_max(); ++s) {
        if (seq < 0 || seq == s) {
            states_.set(s, states::NO_ROW);
        }
    }
}

void kv_cache::release(int64_t hold) {
    require_hold(hold);
    release_in_all(hold);
}

void kv_cache::require_hold(int64_t hold) const {
    const bool known =
        resume_points_.count(hold) > 0 ||
        std::any_of(groups_.begin(), groups_.end(), [&](const kv_group & group) { return group.cells().has_hold(hold); });
    if (!known) {
        fail(KVG_INVALID_ARGUMENT, "this hold was released, by release() or by clear(): hold the cells again");
    }
}

// Whether any group had it.
bool kv_cache::release_in_all(int64_t hold) {
    bool found = resume_points_.erase(hold) > 0;
    for (kv_group & group : groups_) {
        if (group.cells().has_hold(hold)) {
            group.cells().release(hold);
            found = true;
        }
    }
    if (states_.has_hold(hold)) {
        states_.release(hold);
        found = true;
    }
    return found;
}

void kv_cache::clear(bool data) {
    resume_points_.clear();
    checkpoints_.clear();
    states_.clear();
    for (kv_group & group : groups_) {
        group.clear(data);
    }
}

bool kv_cache::broken() const {
    return std::any_of(groups_.begin(), groups_.end(), [](const kv_group & group) { return group.broken(); });
}

} // namespace kvg
