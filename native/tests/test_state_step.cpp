// The tokens of a batch through recurrent states: by runs, as the CPU takes them, and by segments, as devices do. A state is here the text
// that it has read, so that both can be told apart from what the batch says.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "backends.h"
#include "device.h"
#include "hybrid_layers.h"
#include "memory/kv_cache.h"
#include "runtime/state_step.h"

using namespace kvg;

namespace {

using text = std::vector<int32_t>;

constexpr uint32_t N_SEQS = 4;
constexpr uint32_t N_FLOATS = HYBRID_STATE_FLOATS;

// A layer that attends, and one with a short convolution.
struct test_cache {
    backends opened{{cpu_device()}};
    hparams h = layers();
    kv_cache cache{h,
                   {{cpu_device(), cpu_device()}, {cpu_device(), cpu_device()}, {}},
                   opened,
                   {64, 64, N_SEQS, 16 * N_FLOATS * sizeof(float), 0, false, false, 1},
                   {GGML_TYPE_F32, GGML_TYPE_F32, false}};

    test_cache() {
        cache.allocate();
        cache.clear(true);
    }
    static hparams layers() {
        hparams h = hybrid_layers();
        h.here = {0, 2};
        h.n_vocab = 1000;
        return h;
    }
};

// Tokens 0, 1, 2 ... of sequences, behind some of which there is to be a checkpoint.
struct test_batch {
    std::vector<int32_t> tokens, positions, begins{0}, seqs;
    std::vector<uint8_t> outputs, marks;
    std::map<int32_t, int32_t> next; // position of each sequence

    void add(const std::vector<int32_t> & of, bool mark) {
        tokens.push_back(static_cast<int32_t>(tokens.size()));
        positions.push_back(next[of[0]]);
        for (const int32_t seq : of) {
            seqs.push_back(seq);
            ++next[seq];
        }
        begins.push_back(static_cast<int32_t>(seqs.size()));
        outputs.push_back(0);
        marks.push_back(mark);
    }
    kvg_batch all() const {
        return {sizeof(kvg_batch),
                static_cast<int64_t>(tokens.size()),
                tokens.data(),
                positions.data(),
                begins.data(),
                seqs.data(),
                outputs.data(),
                marks.data(),
                nullptr,
                0,
                0,
                0};
    }
    // What a sequence has read up to a token.
    text read_by(int32_t seq, size_t end) const {
        text read;
        for (size_t i = 0; i < end; ++i) {
            if (std::find(seqs.begin() + begins[i], seqs.begin() + begins[i + 1], seq) != seqs.begin() + begins[i + 1]) {
                read.push_back(tokens[i]);
            }
        }
        return read;
    }
};

// begin: the token that those of the micro-batch are counted from
void go_by_runs(const std::vector<recur_run> & runs, uint32_t begin, const float * first_row, std::map<int64_t, text> & rows) {
    const auto row_of = [&](const float * at) { return (at - first_row) / N_FLOATS; };
    for (const recur_run & run : runs) {
        text read = run.from ? rows[row_of(run.from)] : text();
        for (uint32_t t = 0; t < run.n; ++t) {
            read.push_back(static_cast<int32_t>(begin + run.tokens[t]));
            if (run.after[t]) {
                rows[row_of(run.after[t])] = read;
            }
        }
        rows[row_of(run.to)] = read;
    }
}

// All of a group begin with what there was before it.
void go_by_segments(const state_segments & segments, uint32_t begin, int64_t n_rows, std::map<int64_t, text> & rows) {
    size_t segment = 0, token = 0;
    for (const state_group & group : segments.groups) {
        const std::map<int64_t, text> before = rows;
        std::set<int64_t> written;
        for (uint32_t s = 0; s < group.n_seqs; ++s, ++segment) {
            const int64_t from = segments.from[segment];
            text read = from == n_rows ? text() : before.at(from);
            for (uint32_t t = 0; t < group.n_tokens; ++t) {
                read.push_back(static_cast<int32_t>(begin) + segments.order[token++]);
            }
            CHECK(written.insert(segments.to[segment]).second);
            rows[segments.to[segment]] = read;
        }
    }
    CHECK(token == segments.order.size());
    CHECK(segment == segments.from.size());
}

// The batch in micro-batches of n tokens, from nothing.
void check(const test_batch & made, uint32_t n) {
    test_cache test;
    kv_cache & cache = test.cache;
    const kvg_batch in = made.all();
    const batch batch(in, test.h, 64, cache);
    state_step step(cache, batch);
    step.take();
    std::map<int64_t, text> by_runs, by_segments;
    for (uint32_t begin = 0; begin < batch.n_tokens(); begin += n) {
        const uint32_t n_now = std::min(n, batch.n_tokens() - begin);
        go_by_runs(step.runs(begin, n_now), begin, cache.states().rows().on_host(0), by_runs);
        go_by_segments(step.segments(), begin, cache.states().n_rows(), by_segments);
    }
    step.commit();
    for (uint32_t seq = 0; seq < N_SEQS; ++seq) {
        const uint32_t row = cache.states().row_of(seq);
        const text wanted = made.read_by(static_cast<int32_t>(seq), made.tokens.size());
        if (row == states::NO_ROW) {
            CHECK(wanted.empty());
            continue;
        }
        CHECK(by_runs[row] == wanted);
        CHECK(by_segments[row] == wanted);
    }
    for (uint32_t i = 0; i < batch.n_tokens(); ++i) {
        if (made.marks[i]) {
            const text wanted = made.read_by(made.seqs[static_cast<size_t>(made.begins[i])], i + 1);
            CHECK(by_runs[step.row_after(i)] == wanted);
            CHECK(by_segments[step.row_after(i)] == wanted);
        }
    }
}

} // namespace

TEST_CASE("sequences that share tokens and part, others beside them, and states that are wanted on the way") {
    test_batch made;
    made.add({0, 1}, false);
    made.add({2}, false);
    made.add({0, 1}, true);
    made.add({0, 1}, false);
    for (int i = 0; i < 4; ++i) {
        made.add({1}, i == 3);
        made.add({0}, i % 2 == 0);
    }
    made.add({2}, true);
    made.add({3}, true);
    for (uint32_t n = 1; n <= made.tokens.size(); ++n) {
        CAPTURE(n);
        check(made, n);
    }
}

TEST_CASE("batches at random") {
    std::mt19937 random(7);
    const auto below = [&](uint32_t n) { return static_cast<int32_t>(random() % n); };
    for (int trial = 0; trial < 60; ++trial) {
        test_batch made;
        const int n_shared = below(5);
        const int n_sharers = 1 + below(N_SEQS);
        std::vector<int32_t> sharers;
        for (int32_t seq = 0; seq < n_sharers; ++seq) {
            sharers.push_back(seq);
        }
        int n_marks = 0;
        const auto mark = [&] { return below(4) == 0 && ++n_marks <= 12; };
        for (int i = 0; i < n_shared; ++i) {
            made.add(sharers, mark());
        }
        for (int i = 1 + below(30); i > 0; --i) {
            made.add({below(N_SEQS)}, mark());
        }
        const uint32_t n = 1 + static_cast<uint32_t>(below(static_cast<uint32_t>(made.tokens.size())));
        CAPTURE(trial);
        check(made, n);
    }
}

TEST_CASE("prompts of one length are one group, in the order in which they stand") {
    test_cache test;
    test_batch made;
    for (int32_t seq = 0; seq < 3; ++seq) {
        for (int i = 0; i < 5; ++i) {
            made.add({seq}, false);
        }
    }
    const kvg_batch in = made.all();
    const batch batch(in, test.h, 64, test.cache);
    state_step step(test.cache, batch);
    step.take();
    step.runs(0, batch.n_tokens());
    const state_segments segments = step.segments();
    CHECK(segments.groups == std::vector<state_group>{{3, 5}});
    CHECK(segments.in_order());
}
