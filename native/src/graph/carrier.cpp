#include "graph/carrier.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "device.h"
#include "fault.h"
#include "memory/row_io.h"

namespace kvg {

carrier::carrier(const kv_cache & cache, const backends & backends) : cache_(cache), backends_(backends) {
    for (ggml_backend_dev_t device : cache.working()->devices()) {
        ggml_backend_event_ptr event(ggml_backend_event_new(device));
        ggml_backend_event_ptr computed(event ? ggml_backend_event_new(device) : nullptr);
        ggml_backend_ptr out = event && copies_in_order(device) ? open_backend(device) : nullptr;
        copiers_[device] = {open_backend(device), std::move(event), std::move(computed), std::move(out), {}};
    }
}

void carrier::expect(const std::vector<cell_span> & spans, std::vector<std::vector<uint32_t>> written) {
    spans_ = spans;
    written_ = std::move(written);
}

// ggml calls from its own loop, which knows no exceptions.
template <class F> void carrier::unless_failed(F step) {
    if (!failed_) {
        try {
            step();
        } catch (const std::exception &) {
            failed_ = true;
        }
    }
}

void carrier::start(const decode_graph & graph, bool is_ahead) {
    turns_ = &graph.turns();
    n_open_ = n_coming_ = n_here_ = 0;
    failed_ = false;
    is_ahead_ = is_ahead;
    trace_.drop_open();
}

bool carrier::begin(const decode_graph & graph) {
    start(graph, false);
    unless_failed([&] {
        bring_in_before(0, turns_->size());
        if (!turns_->empty() && !turns_->front().after) {
            open(0);
        }
    });
    return !failed_;
}

bool carrier::begin_ahead(const decode_graph & graph) {
    const auto has_events = [](const auto & each) { return each.second.computed != nullptr; };
    if (trace_.is_on() || !std::all_of(copiers_.begin(), copiers_.end(), has_events)) {
        return false;
    }
    start(graph, true);
    unless_failed([&] { bring_in_before(0, 1); });
    return true;
}

bool carrier::give(size_t i) {
    unless_failed([&] {
        if (i > 0) {
            send_out(i - 1);
        }
        bring_in_before(i, i + 1);
        const copier & copier = copiers_.at(turn(i).device);
        const auto come = copier.come.find(turn(i).place);
        // A layer that only writes needs no rows: it waits until those of the layer before have left its place.
        const bool is_filled = (*turns_)[i].attends && come != copier.come.end();
        ggml_backend_event_t ready = is_filled ? come->second.get() : i > 0 ? copier.event.get() : nullptr;
        if (ready) {
            ggml_backend_event_wait(backends_.of(turn(i).device), ready);
        }
    });
    return !failed_;
}

// Behind the turn: where a device does one thing after the other, it computes while these rows are on their way to it.
bool carrier::given(size_t i) {
    unless_failed([&] { bring_in_before(i, turns_->size()); });
    return !failed_;
}

// What may be on its way when n_done turns are over, of the first n.
void carrier::bring_in_before(size_t n_done, size_t n) {
    while (n_coming_ < std::min(n, turns_->size()) && may_come(n_coming_, n_done)) {
        bring_in(n_coming_);
        ++n_coming_;
    }
}

bool carrier::at_node(ggml_tensor * node, bool ask, void * self) {
    auto & c = *static_cast<carrier *>(self);
    const bool is_next = !c.failed_ && c.n_open_ < c.turns_->size() && (*c.turns_)[c.n_open_].after == node;
    if (!ask) {
        c.unless_failed([&] { c.open(c.n_open_); });
    }
    return ask ? is_next : !c.failed_;
}

// All before this turn is computed.
void carrier::open(size_t i) {
    trace_.end_compute();
    if (i > 0) {
        send_out(i - 1);
    }
    if (!all_in_order()) {
        wait(); // also for what goes out: such a device may copy in both directions at once, and the next rows may come to its place
    }
    n_open_ = i + 1;
    bring_in_before(i, turns_->size());
    if (n_here_ <= i) {
        wait_for(i);
    }
    trace_.begin_compute((*turns_)[i].layer);
}

bool carrier::all_in_order() const {
    return std::all_of(copiers_.begin(), copiers_.end(), [](const auto & each) { return each.second.out != nullptr; });
}

// For turn i's rows alone where that is possible, so that the device goes on copying meanwhile.
void carrier::wait_for(size_t i) {
    const auto copier = copiers_.find(turn(i).device);
    if (!all_in_order() || copier == copiers_.end() || copier->second.come.count(turn(i).place) == 0) {
        return wait();
    }
    ggml_backend_event_synchronize(copier->second.come.at(turn(i).place).get());
    trace_.end_copies_to((*turns_)[i].layer);
    n_here_ = i + 1;
}

void carrier::wait() {
    for (const auto & [device, copier] : copiers_) {
        ggml_backend_synchronize(copier.backend.get());
        if (copier.out) {
            ggml_backend_synchronize(copier.out.get());
        }
        for (ggml_backend_event_t event : {copier.event.get(), copier.computed.get()}) {
            if (event) {
                ggml_backend_event_synchronize(event); // at once; Vulkan frees here what it has recorded
            }
        }
        for (const auto & [place, come] : copier.come) {
            ggml_backend_event_synchronize(come.get());
        }
    }
    trace_.end_copies();
    n_here_ = n_coming_;
}

// Whether turn i's place is free when n_done turns are computed.
bool carrier::may_come(size_t i, size_t n_done) const {
    const auto same_place = [&](const graph_turn & other) {
        const row_turn & t = cache_.working()->of(other.layer);
        return t.device == turn(i).device && t.place == turn(i).place;
    };
    const auto at = [&](size_t n) { return turns_->begin() + static_cast<ptrdiff_t>(std::min(n, i)); };
    return !turn(i).is_owner || std::none_of(at(n_done), at(i), same_place);
}

void carrier::bring_in(size_t i) {
    const row_turn & t = turn(i);
    const auto [layer, attends, after] = (*turns_)[i];
    if (!t.is_owner || !attends) {
        return;
    }
    fault_point("carry-in");
    const kv_group & group = cache_.group_of(layer);
    const cell_span & span = spans_[cache_.group_index_of(layer)];
    copier & copier = copiers_.at(t.device);
    ggml_backend_t by = copier.backend.get();
    trace_.begin_copy(KVG_SPAN_COPY_IN, layer, span.n * (group.k_row_bytes() + group.v_row_bytes()));
    copy_in(by, group.k(layer), t.k, span);
    if (t.v) {
        copy_in(by, group.v(layer), t.v, span);
    }
    if (copier.out || is_ahead_) {
        ggml_backend_event_ptr & come = copier.come[t.place];
        come = come ? std::move(come) : ggml_backend_event_ptr(ggml_backend_event_new(t.device));
        ggml_backend_event_record(come.get(), by);
    } else if (copier.event) {
        ggml_backend_event_record(copier.event.get(), by); // Vulkan begins no copy before this, or before it is waited for
    }
}

void carrier::copy_in(ggml_backend_t by, const ggml_tensor * host, ggml_tensor * there, const cell_span & span) {
    const size_t begin = span.begin * host->nb[1];
    ggml_backend_tensor_set_async(by, there, static_cast<const uint8_t *>(host->data) + begin, begin, span.n * host->nb[1]);
}

void carrier::send_out(size_t i) {
    const row_turn & t = turn(i);
    const uint32_t layer = (*turns_)[i].layer;
    copier & copier = copiers_.at(t.device);
    ggml_backend_t by = copier.out ? copier.out.get() : copier.backend.get();
    if (is_ahead_) { // rows go when they are written, and others come to their place when they are read
        ggml_backend_event_record(copier.computed.get(), backends_.of(t.device));
        ggml_backend_event_wait(copier.backend.get(), copier.computed.get());
        if (copier.out) {
            ggml_backend_event_wait(by, copier.computed.get());
        }
    }
    if (!t.is_owner) {
        return;
    }
    fault_point("carry-out");
    const kv_group & group = cache_.group_of(layer);
    const std::vector<uint32_t> & cells = written_[cache_.group_index_of(layer)];
    trace_.begin_copy(KVG_SPAN_COPY_OUT, layer, cells.size() * (group.k_row_bytes() + group.v_row_bytes()));
    copy_out(t.device, by, t.k, group.k(layer), cells);
    if (t.v) {
        copy_out(t.device, by, t.v, group.v(layer), cells);
    }
    if (copier.out || is_ahead_) {
        ggml_backend_event_record(copier.event.get(), by);
        ggml_backend_event_wait(copier.backend.get(), copier.event.get()); // what comes after this may take its place
    }
}

// Only these rows: others may be written from outside meanwhile.
void carrier::copy_out(ggml_backend_dev_t device, ggml_backend_t by, const ggml_tensor * there, ggml_tensor * host,
                       const std::vector<uint32_t> & cells) {
    constexpr size_t MAX_TRANSFERS = 16; // beyond so many it is faster to read what lies between them, too
    const std::vector<cell_span> runs = runs_of(cells);
    if (runs.size() > MAX_TRANSFERS) {
        ggml_backend_synchronize(backends_.of(device)); // what it was given ahead
        std::vector<uint8_t> rows(cells.size() * host->nb[1]);
        read_rows_of(there, cells, rows.data());
        write_only_rows_of(host, cells, rows.data());
        return;
    }
    for (const cell_span & run : runs) {
        const size_t begin = run.begin * host->nb[1];
        ggml_backend_tensor_get_async(by, there, static_cast<uint8_t *>(host->data) + begin, begin, run.n * host->nb[1]);
    }
}

bool carrier::finish(bool is_computed) {
    failed_ = failed_ || !is_computed;
    unless_failed([&] {
        trace_.end_compute();
        if (!turns_->empty()) {
            send_out(turns_->size() - 1);
        }
    });
    const bool failed = std::exchange(failed_, false);
    unless_failed([&] {
        for (ggml_backend_t backend : is_ahead_ ? backends_.all() : std::vector<ggml_backend_t>()) {
            ggml_backend_synchronize(backend);
        }
        wait();
    });
    failed_ = failed_ || failed;
    return !failed_;
}

} // namespace kvg
