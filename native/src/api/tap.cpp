// Rows that are taken while they are computed.
#include <algorithm>
#include <limits>

#include "api/handles.h"
#include "runtime/bounded.h"

using namespace kvg;

kvg_status kvg_tap_open(kvg_context * context, int64_t seq, uint64_t max_bytes, kvg_tap ** out) {
    return on_context(context, [&](class context & c) {
        need(out, "out") = nullptr;
        const int64_t last = int64_t{c.cache().n_seq_max()} - 1;
        auto handle = std::make_unique<kvg_tap>();
        handle->context = context->owned;
        handle->tap = c.taps().open(static_cast<uint32_t>(bounded("seq", seq, 0, last)), max_bytes);
        *out = handle.release();
    });
}

kvg_status kvg_tap_tell(kvg_context * context, kvg_tap * tap, kvg_tap_told * out) {
    return on_context(context, [&](class context &) {
        kvg_tap_told & told = need_struct(out, "out");
        if (need(tap, "tap").context != context->owned) {
            fail(KVG_INVALID_ARGUMENT, "this tap is another context's");
        }
        const tap::told since = tap->tap->tell();
        told = {sizeof(told), since.n_decodes, since.first, since.taken};
    });
}

kvg_status kvg_tap_mark(kvg_tap * tap) {
    return guarded([&] { need(tap, "tap").tap->mark(); });
}

kvg_status kvg_tap_next(kvg_tap * tap, int64_t milliseconds, kvg_tapped * out) {
    return guarded([&] {
        kvg_tapped & found = need_struct(out, "out");
        const std::chrono::milliseconds time(bounded("milliseconds", milliseconds, 0, std::numeric_limits<int32_t>::max()));
        std::optional<tapped> & item = need(tap, "tap").item;
        item = tap->tap->next(time);
        found = {sizeof(found), -1, 0, 0, 0};
        if (item) {
            found.group = static_cast<int64_t>(item->group);
            found.layer = static_cast<int64_t>(item->place);
            found.n_cells = static_cast<int64_t>(item->positions.size());
            found.n_bytes = item->rows.size();
        }
    });
}

kvg_status kvg_tap_take(kvg_tap * tap, int32_t * pos, uint8_t * data, uint64_t n_bytes) {
    return guarded([&] {
        std::optional<tapped> & item = need(tap, "tap").item;
        if (!item || n_bytes != item->rows.size()) {
            fail(KVG_INVALID_ARGUMENT, "there are no %llu bytes to be taken", static_cast<unsigned long long>(n_bytes));
        }
        std::copy(item->positions.begin(), item->positions.end(), &need(pos, "pos"));
        std::copy(item->rows.begin(), item->rows.end(), &need(data, "data"));
        item.reset();
    });
}

void kvg_tap_free(kvg_tap * tap) {
    if (tap) {
        tap->tap->abandon();
    }
    std::unique_ptr<kvg_tap>{tap}.reset();
}
