#include "runtime/graph_run.h"

#include <chrono>

#include <sys/resource.h>

#include "team.h"

namespace kvg {

static double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Of this thread: how long it had a CPU, and how often the kernel gave its CPU to somebody else. The kernel takes microseconds to tell
// that of all threads.
static step_cost used() {
    rusage usage = {};
    getrusage(RUSAGE_THREAD, &usage);
    const auto in_seconds = [](const timeval & t) {
        return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
    };
    return {seconds(), in_seconds(usage.ru_utime) + in_seconds(usage.ru_stime), usage.ru_nivcsw};
}

void graph_run::compute(const decode_graph & graph, uint32_t n_tokens) {
    thread_choice & choice = threads_.of(n_tokens);
    if (choice.is_fixed()) {
        return compute_on(graph, 1); // what it costs is not asked: that takes a microsecond
    }
    const step_cost begin = used();
    compute_on(graph, choice.next(begin.seconds));
    const step_cost end = used();
    choice.took(end.seconds, n_tokens, end - begin);
}

void graph_run::compute_on(const decode_graph & graph, int n_threads) {
    const int of_team = graph.is_for_team() ? n_threads : 1;
    const team_share team(of_team);
    backends_.set_threads(graph.is_for_team() ? 1 : n_threads);
    team::here().wake(of_team);
    decoder_.compute();
}

} // namespace kvg
