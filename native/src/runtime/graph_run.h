// Computes graphs with as many threads as are worthwhile.
#pragma once

#include <cstdint>

#include "backends.h"
#include "graph/decoder.h"
#include "runtime/thread_choice.h"

namespace kvg {

class graph_run {
public:
    // n_threads: for one token at a time; n_threads_batch: for more. The others must outlive this object.
    graph_run(const backends & backends, decoder & decoder, int n_threads, int n_threads_batch)
        : backends_(backends), decoder_(decoder), threads_(n_threads, n_threads_batch) {}

    // The graph that was prepared, as decoder::compute() does it. Graphs of as many tokens should be alike.
    void compute(const decode_graph & graph, uint32_t n_tokens);

private:
    void compute_on(const decode_graph & graph, int n_threads);

    const backends & backends_;
    decoder & decoder_;
    thread_choices threads_;
};

} // namespace kvg
