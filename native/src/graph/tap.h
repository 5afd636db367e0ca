// Copies of the rows that a graph writes for a sequence, layer by layer, for somebody who sends them elsewhere meanwhile.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <ggml-cpp.h>

#include "graph/frame.h"
#include "memory/kv_cache.h"

namespace kvg {

// K and then V of some cells in a layer, or a mark: then there are none.
struct tapped {
    size_t group;
    size_t place; // of the layer in its group
    std::vector<int32_t> positions;
    std::vector<uint8_t> rows;
};

class tap {
public:
    // seq: whose rows. max_bytes: of rows that nobody has taken yet; beyond it the tap is over
    tap(const kv_cache & cache, uint32_t seq, uint64_t max_bytes) : cache_(cache), seq_(seq), max_bytes_(max_bytes) {}

    uint32_t seq() const { return seq_; }
    // What the next graph writes for the sequence: positions, and in each group their cells; none when there is nothing to take.
    void expect(std::vector<int32_t> positions, std::vector<std::vector<uint32_t>> cells);
    bool expects() const { return !positions_.empty() && max_bytes_ > 0; }
    // A layer's rows have been written.
    void add(uint32_t layer) noexcept;
    // A decode has succeeded, and this is its lowest position of the sequence.
    void decoded(int32_t first);
    // What was done since this was asked last; -1: nothing
    struct told {
        int64_t n_decodes = 0;
        int32_t first = -1;
        int32_t taken = -1;
    };
    told tell();
    // Nobody takes anything any more. From any thread
    void abandon() { is_abandoned_ = true; }
    bool is_abandoned() const { return is_abandoned_; }

    // The two above and these two any thread may call. What comes from now on was written later.
    void mark();
    // What is the oldest, when it has come before that time is over; nullopt: nothing has.
    // error(KVG_DEVICE) when the tap is over
    std::optional<tapped> next(std::chrono::milliseconds time);

private:
    void push(tapped item);
    tapped read(uint32_t layer) const;

    const kv_cache & cache_;
    const uint32_t seq_;
    const uint64_t max_bytes_;
    std::vector<int32_t> positions_;
    std::vector<std::vector<uint32_t>> cells_;
    told since_;
    std::mutex mutex_; // of what follows
    std::condition_variable changed_;
    std::deque<tapped> items_;
    uint64_t n_bytes_ = 0;
    bool is_over_ = false;
    std::atomic<bool> is_abandoned_{false};
};

// Those of a context.
class taps {
public:
    explicit taps(const kv_cache & cache) : cache_(cache) {}

    std::shared_ptr<tap> open(uint32_t seq, uint64_t max_bytes);
    // Forgets those that were abandoned.
    void sweep();
    const std::vector<std::shared_ptr<tap>> & all() const { return open_; }
    // whether the next graph writes what anybody takes
    bool expect_any() const;

    // Before a graph is computed.
    void begin(const decode_graph & graph);
    // Whether the rows of a layer are there when this node is computed; then, that it was.
    bool asks(const ggml_tensor * node) const { return next_ < stored_.size() && stored_[next_].v == node; }
    void computed();

private:
    struct layer_rows {
        uint32_t layer;
        const ggml_tensor * v; // the last node that writes them
    };

    const kv_cache & cache_;
    std::vector<std::shared_ptr<tap>> open_;
    std::vector<layer_rows> stored_; // of the graph that runs, in its order
    size_t next_ = 0;
};

} // namespace kvg
