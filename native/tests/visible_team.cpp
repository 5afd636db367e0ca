// GCC's OpenMP, as far as ggml uses it, made of std::thread: ThreadSanitizer can't see what the threads of libgomp wait for, and would
// call each of ggml's barriers a race. Linked or preloaded before libgomp, in the build with KVGRAPH_SANITIZE=thread only.
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace {

struct team {
    explicit team(int n) : size(n) {}
    const int size;
    std::mutex mutex;
    std::condition_variable all_here;
    int n_waiting = 0;
    int n_barriers = 0;
    int n_singles = 0; // `omp single` sections that a thread has entered
};

struct member {
    team * of = nullptr;
    int index = 0;
    int n_singles = 0; // that this thread has come to
};

thread_local member self;

} // namespace

extern "C" {

void GOMP_parallel(void (*work)(void *), void * data, unsigned n_threads, unsigned) {
    const member before = self; // ggml quantizes in parallel on one thread inside of another team
    team here(n_threads ? static_cast<int>(n_threads) : 1);
    std::vector<std::thread> others;
    for (int i = 1; i < here.size; ++i) {
        others.emplace_back([&here, work, data, i] {
            self = {&here, i, 0};
            work(data);
        });
    }
    self = {&here, 0, 0};
    work(data);
    for (std::thread & other : others) {
        other.join();
    }
    self = before;
}

void GOMP_barrier() {
    if (!self.of) {
        return;
    }
    std::unique_lock<std::mutex> lock(self.of->mutex);
    const int barrier = self.of->n_barriers;
    if (++self.of->n_waiting == self.of->size) {
        self.of->n_waiting = 0;
        ++self.of->n_barriers;
        self.of->all_here.notify_all();
        return;
    }
    self.of->all_here.wait(lock, [&] { return self.of->n_barriers != barrier; });
}

bool GOMP_single_start() {
    if (!self.of) {
        return true;
    }
    const std::lock_guard<std::mutex> lock(self.of->mutex);
    if (self.n_singles++ < self.of->n_singles) {
        return false;
    }
    ++self.of->n_singles;
    return true;
}

int omp_get_num_threads() { return self.of ? self.of->size : 1; }
int omp_get_thread_num() { return self.index; }
}
