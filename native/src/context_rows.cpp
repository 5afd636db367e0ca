// A context's K and V, out of the cache and back in.
#include "context.h"

#include <algorithm>
#include <limits>

#include "cache/slots.h"
#include "device.h"
#include "error.h"
#include "fault.h"

namespace kvg {

void context::read(int64_t layer, bool v, float * out, uint64_t n_floats) {
    bounded("layer", layer, 0, static_cast<int64_t>(cache_->n_layer()) - 1);
    const uint64_t wanted = uint64_t{cache_->cells().size()} * model_->hparams().n_embd_kv();
    if (!out || n_floats != wanted) {
        fail(KVG_INVALID_ARGUMENT, "the buffer holds %llu floats, expected %llu", (unsigned long long) n_floats,
             (unsigned long long) wanted);
    }
    flush(NO_DEFRAG, flushed_);
    cache_->read(static_cast<uint32_t>(layer), v, out);
    if (!v) {
        shift_->leave_frame(out);
    }
}

void context::read_rows(const int32_t * cells, uint64_t n_cells, uint8_t * out, uint64_t n_bytes) {
    const uint32_t size = cache_->cells().size();
    if (n_bytes != n_cells * cache_->cell_bytes()) {
        fail(KVG_INVALID_ARGUMENT, "the buffer holds %llu bytes, expected %llu", (unsigned long long) n_bytes,
             (unsigned long long) (n_cells * cache_->cell_bytes()));
    }
    std::vector<uint32_t> rows(n_cells);
    for (uint64_t i = 0; i < n_cells; ++i) {
        rows[i] = static_cast<uint32_t>(bounded("cell", cells[i], 0, int64_t{size} - 1));
    }
    flush(NO_DEFRAG, flushed_);
    advise_huge_pages(out, n_bytes);
    cache_->read_rows(rows, out, n_threads_batch_);
    shift_->leave_frame(rows, out, n_threads_batch_);
}

// The cells with these in place of a sequence's, and where they are.
std::pair<cells, std::vector<uint32_t>> context::replaced(int64_t seq, const kvg_kv_rows & in) const {
    const uint32_t n_seq_max = cache_->cells().n_seq_max();
    cells next = cache_->cells();
    next.seq_rm(seq, 0, -1);
    pos_bounds loaded;
    std::for_each(in.pos, in.pos + in.n_cells, [&](int32_t pos) { loaded.include(pos); });
    if (next.n_used() == 0 || !loaded.fit(next.frame())) {
        next.set_frame(0);
    }
    const auto n = static_cast<uint32_t>(in.n_cells);
    const std::vector<uint32_t> slots = find_slots(next, n, "what is loaded");
    for (uint32_t i = 0; i < n; ++i) {
        seq_set set = next.make_set();
        bool seen = false;
        for (uint32_t s = 0; s < n_seq_max; ++s) {
            const bool member = in.seq[static_cast<size_t>(i) * n_seq_max + s] != 0;
            set[s / 64] |= static_cast<uint64_t>(member) << (s % 64);
            seen = seen || member;
        }
        if (in.pos[i] < 0 || !seen) {
            fail(KVG_INVALID_ARGUMENT, "cell %u of %u has position %d and %s", i, n, in.pos[i],
                 seen ? "a sequence" : "no sequence");
        }
        next.put(slots[i], in.pos[i], set);
        next.set_source(slots[i], in.pos[i], in.dither[i]);
    }
    return {std::move(next), slots};
}

void context::replace(int64_t seq, const kvg_kv_rows & in) {
    bounded("n_cells", in.n_cells, 0, std::numeric_limits<int32_t>::max());
    if (in.n_bytes != static_cast<uint64_t>(in.n_cells) * cache_->cell_bytes()) {
        fail(KVG_INVALID_ARGUMENT, "%llu bytes of K and V, expected %llu for %lld cells", (unsigned long long) in.n_bytes,
             (unsigned long long) (static_cast<uint64_t>(in.n_cells) * cache_->cell_bytes()),
             static_cast<long long>(in.n_cells));
    }
    replaced(seq, in); // refuses what can't be before anything changes
    if (seq >= 0) {
        flush(NO_DEFRAG, flushed_); // of those that stay
    }
    require_intact();
    auto [next, slots] = replaced(seq, in);
    unfinished_rows rows(*cache_); // some may be those of cells that are to be replaced
    cache_->write_rows(slots, in.data, n_threads_batch_);
    fault_point("load-write");
    rows.done();
    std::swap(cache_->cells(), next);
}

} // namespace kvg
