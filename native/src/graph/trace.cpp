#include "graph/trace.h"

#include <algorithm>

namespace kvg {

void trace::add(const kvg_span & span) {
    spans_.push_back(span);
    spans_.back().end = now();
    if (spans_.size() > MAX_SPANS) {
        spans_.pop_front();
    }
}

void trace::end_copies() {
    for (const kvg_span & copy : copies_) {
        add(copy);
    }
    copies_.clear();
}

void trace::end_copies_to(uint32_t layer) {
    const auto last = std::find_if(copies_.begin(), copies_.end(), [&](const kvg_span & copy) {
        return copy.kind == KVG_SPAN_COPY_IN && copy.layer == layer_of(layer);
    });
    if (last != copies_.end()) {
        std::for_each(copies_.begin(), last + 1, [&](const kvg_span & copy) { add(copy); });
        copies_.erase(copies_.begin(), last + 1);
    }
}

void trace::begin_compute(uint32_t layer) {
    if (is_on_) {
        compute_ = {now(), 0, 0, layer_of(layer), KVG_SPAN_COMPUTE};
    }
}

void trace::end_compute() {
    if (compute_) {
        add(*compute_);
    }
    compute_.reset();
}

void trace::drop_open() {
    copies_.clear();
    compute_.reset();
}

size_t trace::take(kvg_span * out, size_t n) {
    is_on_ = true;
    n = std::min(n, spans_.size());
    const auto end = spans_.begin() + static_cast<ptrdiff_t>(n);
    std::copy(spans_.begin(), end, out);
    spans_.erase(spans_.begin(), end);
    return n;
}

} // namespace kvg
