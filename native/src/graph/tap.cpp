#include "graph/tap.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "error.h"
#include "memory/row_io.h"

namespace kvg {

void tap::expect(std::vector<int32_t> positions, std::vector<std::vector<uint32_t>> cells) {
    positions_ = std::move(positions);
    cells_ = std::move(cells);
}

// Where the graph has written them: on a device with working rows, these.
tapped tap::read(uint32_t layer) const {
    const size_t g = cache_.group_index_of(layer);
    const kv_group & group = cache_.groups()[g];
    const auto place = std::find(group.layers().begin(), group.layers().end(), layer) - group.layers().begin();
    const row_turn * turn = cache_.working() ? &cache_.working()->of(layer) : nullptr;
    const bool at_work = turn && turn->k;
    const size_t n = positions_.size();
    tapped item = {g, static_cast<size_t>(place), positions_,
                   std::vector<uint8_t>(n * (group.k_row_bytes() + group.v_row_bytes()))};
    read_rows_of(at_work ? turn->k : group.k(layer), cells_[g], item.rows.data());
    if (group.spec().v_in_k == 0) {
        read_rows_of(at_work ? turn->v : group.v(layer), cells_[g], item.rows.data() + n * group.k_row_bytes());
    }
    return item;
}

// ggml calls from its own loop, which knows no exceptions.
void tap::add(uint32_t layer) noexcept {
    try {
        since_.taken = positions_.back();
        push(read(layer));
    } catch (const std::exception &) {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_over_ = true;
        changed_.notify_all();
    }
}

void tap::push(tapped item) {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_over_ = is_over_ || n_bytes_ + item.rows.size() > max_bytes_;
    if (!is_over_) {
        n_bytes_ += item.rows.size();
        items_.push_back(std::move(item));
    }
    changed_.notify_all();
}

void tap::decoded(int32_t first) {
    ++since_.n_decodes;
    since_.first = since_.first < 0 ? first : std::min(since_.first, first);
}

tap::told tap::tell() { return std::exchange(since_, {}); }

void tap::mark() {
    if (max_bytes_ > 0) { // else nobody waits for it
        push({0, 0, {}, {}});
    }
}

std::optional<tapped> tap::next(std::chrono::milliseconds time) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, time, [&] { return !items_.empty() || is_over_; });
    if (is_over_) {
        fail(KVG_DEVICE, "rows were not taken in time: more than %llu bytes wait, or there is no memory for them",
             static_cast<unsigned long long>(max_bytes_));
    }
    if (items_.empty()) {
        return std::nullopt;
    }
    tapped item = std::move(items_.front());
    items_.pop_front();
    n_bytes_ -= item.rows.size();
    return item;
}

std::shared_ptr<tap> taps::open(uint32_t seq, uint64_t max_bytes) {
    open_.push_back(std::make_shared<tap>(cache_, seq, max_bytes));
    return open_.back();
}

void taps::sweep() {
    open_.erase(std::remove_if(open_.begin(), open_.end(), [](const auto & each) { return each->is_abandoned(); }),
                open_.end());
}

bool taps::expect_any() const {
    return std::any_of(open_.begin(), open_.end(), [](const auto & each) { return each->expects(); });
}

void taps::begin(const decode_graph & graph) {
    stored_.clear();
    next_ = 0;
    for (uint32_t il = 0; il < graph.stored().size(); ++il) {
        if (graph.stored()[il].v) {
            stored_.push_back({il, graph.stored()[il].v});
        }
    }
}

void taps::computed() {
    for (const std::shared_ptr<tap> & each : open_) {
        if (each->expects()) {
            each->add(stored_[next_].layer);
        }
    }
    ++next_;
}

} // namespace kvg
