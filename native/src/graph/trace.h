// What was copied and computed when, layer by layer, from when somebody first asks for it: to know it takes waiting for each layer. It is
// kept until somebody takes it; the oldest is forgotten when nobody does.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "kvgraph.h"

namespace kvg {

class trace {
public:
    // Copies end when they are known to have: end_copies() ends all that have begun.
    void begin_copy(kvg_span_kind kind, uint32_t layer, uint64_t n_bytes) {
        if (is_on_) {
            copies_.push_back({now(), 0, n_bytes, layer_of(layer), kind});
        }
    }
    void end_copies();
    // Ends the copies up to that of a layer to the device: a device makes them in this order.
    void end_copies_to(uint32_t layer);
    void begin_compute(uint32_t layer);
    // Does nothing when none has begun.
    void end_compute();
    // of a graph that failed: what has no end is forgotten
    void drop_open();
    // The oldest spans, at most n, are moved there; returns how many. From the first call on there are any.
    size_t take(kvg_span * out, size_t n);
    bool is_on() const { return is_on_; }

private:
    static constexpr size_t MAX_SPANS = 1 << 16;

    static int32_t layer_of(uint32_t layer) { return static_cast<int32_t>(layer); }
    static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
    void add(const kvg_span & span);

    bool is_on_ = false;
    std::deque<kvg_span> spans_;   // in the order of their ends
    std::vector<kvg_span> copies_; // that have begun
    std::optional<kvg_span> compute_;
};

} // namespace kvg
