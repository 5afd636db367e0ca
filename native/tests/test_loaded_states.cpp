// States that come in with a saved sequence, while the host has no memory: all of them, or none.
#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "backends.h"
#include "device.h"
#include "hybrid_layers.h"
#include "memory/kv_cache.h"
#include "runtime/loaded_states.h"
#include "scarce_memory.h"

using namespace kvg;

namespace {

constexpr uint32_t N_FLOATS = HYBRID_STATE_FLOATS;

// A layer that attends, and one with a short convolution. Sequence 1 has five cells and a state of ones, kept at its end.
struct test_cache {
    backends opened{{cpu_device()}};
    kv_cache cache;

    test_cache() : cache(hybrid_layers(), homes(), opened, sizes(), {GGML_TYPE_F32, GGML_TYPE_F32, false}) {
        cache.allocate();
        cache.clear(true);
        for (uint32_t i = 0; i < 5; ++i) {
            cache.groups()[0].cells().put(i, static_cast<int32_t>(i), {0b10});
        }
        const uint32_t row = cache.states().take();
        std::fill_n(cache.states().rows().on_host(row), N_FLOATS, 1.0f);
        cache.states().set(1, row);
        cache.states().drop(row);
        cache.keep_checkpoint(1);
    }

    static kv_homes homes() { return {{cpu_device(), cpu_device()}, {cpu_device(), cpu_device()}, {}}; }
    static cache_size sizes() { return {64, 8, 2, 3 * N_FLOATS * sizeof(float), 0, false, false, 1}; }
};

} // namespace

TEST_CASE("states that are loaded need no memory once it is reserved, and change nothing before") {
    const std::vector<int32_t> seqs = {0, 0};
    const std::vector<int32_t> places = {-1, 4};
    const std::vector<int32_t> rows = {0, 1};
    const std::vector<float> data(2 * N_FLOATS, 2.0f);
    const int32_t lost = -1;
    const kvg_kv_state_list in = {sizeof(in), 2, seqs.data(), places.data(), rows.data(), 2, data.data()};
    const kvg_kv_checkpoint_list checkpoints = {sizeof(checkpoints), 1, seqs.data(), &places[1], &lost};

    test_cache test;
    kv_cache & cache = test.cache;
    const std::vector<int64_t> holds = {cache.new_hold()};
    int64_t n = 0;
    bool done = false;
    while (!done) {
        loaded_states loaded(cache, 0, in, checkpoints, holds);
        done = done_with(n, [&] {
            loaded.reserve({});
            cache.reserve_checkpoints(holds.size());
        });
        CHECK(cache.states().n_used() == 1);
        CHECK(cache.states().row_of(0) == states::NO_ROW);
        CHECK_FALSE(cache.states().has_hold(holds[0]));
        CHECK(cache.checkpoints(1) == std::vector<int32_t>{5});
        n += !done;
        if (done) {
            CHECK(done_with(0, [&] {
                cache.add_checkpoint(0, 4, holds[0]);
                loaded.commit();
            }));
        }
    }
    CHECK(n >= 3); // rows, a hold, the checkpoint
    CHECK(cache.states().n_used() == 3);
    CHECK(cache.states().rows().on_host(cache.states().row_of(0))[N_FLOATS - 1] == 2.0f);
    CHECK(cache.states().has_hold(holds[0]));
    CHECK(cache.states().rows().on_host(cache.states().row_of(1))[0] == 1.0f);
}

TEST_CASE("no checkpoint goes for what would not fit without any") {
    test_cache test;
    kv_cache & cache = test.cache;
    CHECK(cache.states().n_rows() == 7); // two for each sequence, and three
    CHECK_FALSE(cache.require_states(7));
    CHECK(cache.checkpoints(1) == std::vector<int32_t>{5});
    CHECK(cache.require_states(6));
    CHECK(cache.checkpoints(1) == std::vector<int32_t>{5}); // its row is the sequence's own, too
}
