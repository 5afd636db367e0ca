// Carries rows of K and V between host memory and the working rows of devices while a graph runs, so that each layer finds its attended
// span when its turn comes, and what it wrote is in host memory when the graph has run.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include <ggml-cpp.h>

#include "backends.h"
#include "graph/frame.h"
#include "graph/trace.h"
#include "memory/kv_cache.h"

namespace kvg {

class carrier {
public:
    // cache: with working rows. backends: those that graphs run on. Both must outlive this object. error(KVG_DEVICE) when a device can't be
    // opened for copies
    carrier(const kv_cache & cache, const backends & backends);

    // What the next graph attends to, and the cells of its tokens, in each group.
    void expect(const std::vector<cell_span> & spans, std::vector<std::vector<uint32_t>> written);
    // Before a graph is computed, and after; is_computed: whether it was. False when a device failed: then rows of the graph's tokens are
    // not in host memory. No copy is under way after finish().
    bool begin(const decode_graph & graph);
    bool finish(bool is_computed);
    // In place of begin(): parts of the graph are given to devices before those before them are computed. give() is called before a turn's
    // first part is, given() behind it; both are false when a device failed. False, and nothing is begun: devices must be waited for, as they
    // have no events, or somebody wants to know when what was.
    bool begin_ahead(const decode_graph & graph);
    bool give(size_t i);
    bool given(size_t i);
    class trace & trace() { return trace_; }
    // For ggml_backend_sched_set_eval_callback; `self` is a carrier.
    static bool at_node(ggml_tensor * node, bool ask, void * self);

private:
    // More backends of a device, so that copies don't wait for graphs.
    struct copier {
        ggml_backend_ptr backend;
        ggml_backend_event_ptr event;    // nullptr where the device has none
        ggml_backend_event_ptr computed; // when turns are given ahead: the last one is
        // Where copies of a backend run in their order the device itself waits before it overwrites rows that go out. Those have a backend
        // of their own there: each copy takes 10 us to begin, and rows that come would wait for it. nullptr elsewhere
        ggml_backend_ptr out;
        std::map<uint32_t, ggml_backend_event_ptr> come; // to each place
    };
    const row_turn & turn(size_t i) const { return cache_.working()->of((*turns_)[i].layer); }
    template <class F> void unless_failed(F step);
    void start(const decode_graph & graph, bool is_ahead);
    void open(size_t i);
    bool all_in_order() const;
    void wait();
    void wait_for(size_t i);
    bool may_come(size_t i, size_t n_done) const;
    void bring_in_before(size_t n_done, size_t n);
    void bring_in(size_t i);
    void send_out(size_t i);
    void copy_in(ggml_backend_t by, const ggml_tensor * host, ggml_tensor * there, const cell_span & span);
    void copy_out(ggml_backend_dev_t device, ggml_backend_t by, const ggml_tensor * there, ggml_tensor * host,
                  const std::vector<uint32_t> & cells);

    const kv_cache & cache_;
    const backends & backends_;
    std::map<ggml_backend_dev_t, copier> copiers_;
    std::vector<cell_span> spans_; // of each group
    std::vector<std::vector<uint32_t>> written_;
    const std::vector<graph_turn> * turns_ = nullptr; // of the graph that runs
    size_t n_open_ = 0;                               // turns that have begun
    size_t n_coming_ = 0;                             // whose rows have come, or are on their way
    size_t n_here_ = 0;                               // whose rows have come
    bool failed_ = false;
    bool is_ahead_ = false; // begin_ahead() began
    class trace trace_;
};

} // namespace kvg
