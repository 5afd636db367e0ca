// The cache: cells, what is pending, K and V in and out.
#include <algorithm>
#include <limits>
#include <vector>

#include "api/handles.h"
#include "runtime/bounded.h"

using namespace kvg;

static const kv_cache & cache_of(const kvg_context * context) {
    need(context, "context").context.intake().sweep(); // what is told here counts what was abandoned as empty
    return context->context.cache();
}

static const kv_group & group_of(const kvg_context * context, int64_t group) {
    const auto & groups = cache_of(context).groups();
    return groups[static_cast<size_t>(bounded("group", group, 0, static_cast<int64_t>(groups.size()) - 1))];
}

kvg_status kvg_kv_get_info(const kvg_context * context, kvg_kv_info * out) {
    return guarded([&] {
        const kv_cache & cache = cache_of(context);
        need_struct(out, "out");
        *out = {sizeof(*out),
                static_cast<int64_t>(cache.groups().size()),
                cache.n_free(),
                cache.n_seq_max(),
                cache.n_layer(),
                static_cast<int64_t>(cache.bytes()),
                static_cast<int64_t>(cache.cell_bytes()),
                cache.types().k, // a kvg_type has ggml's number
                cache.types().v,
                context->context.can_shift(),
                cache.states().n_rows(),
                cache.states().n_used(),
                static_cast<int64_t>(cache.state_layers().size()),
                static_cast<int64_t>(cache.states().row_bytes())};
    });
}

kvg_status kvg_kv_get_group(const kvg_context * context, int64_t group, kvg_group_info * out) {
    return guarded([&] {
        const kv_group & g = group_of(context, group);
        const hadamard_sizes mixed = g.mixed();
        need_struct(out, "out");
        *out = {sizeof(*out),
                g.spec().window == 0 ? KVG_GROUP_FULL : KVG_GROUP_WINDOW,
                g.spec().window,
                g.cells().size(),
                g.cells().n_used(),
                g.cells().n_kv(),
                static_cast<int64_t>(g.layers().size()),
                g.spec().n_head_kv,
                g.spec().head_dim_k,
                g.spec().head_dim_v,
                context->context.step().n_attended(static_cast<size_t>(group)),
                static_cast<int64_t>(g.k_row_bytes()),
                static_cast<int64_t>(g.v_row_bytes()),
                mixed.k > 0,
                mixed.v > 0,
                context->context.has_long_rope(static_cast<size_t>(group)),
                context->context.upkeep().is_settled(static_cast<size_t>(group)),
                g.n_fresh(),
                static_cast<int64_t>(g.old_k_row_bytes()),
                static_cast<int64_t>(g.old_v_row_bytes())};
    });
}

kvg_status kvg_kv_group_layers(const kvg_context * context, int64_t group, int32_t * out) {
    return guarded([&] {
        const std::vector<uint32_t> & layers = group_of(context, group).layers();
        std::copy(layers.begin(), layers.end(), &need(out, "out"));
    });
}

kvg_status kvg_kv_seq_rm(kvg_context * context, int64_t seq, int64_t p0, int64_t p1) {
    return on_context(context, [&](class context & c) { c.cache().seq_rm(seq, p0, p1); });
}

kvg_status kvg_kv_seq_rm_at(kvg_context * context, int64_t seq, const int32_t * pos, int64_t n_pos) {
    return on_context(context, [&](class context & c) {
        const int64_t n = bounded("n_pos", n_pos, 0, std::numeric_limits<int32_t>::max());
        c.cache().seq_rm_at(seq, n == 0 ? std::vector<int32_t>() : std::vector<int32_t>(&need(pos, "pos"), pos + n));
    });
}

kvg_status kvg_kv_seq_cp(kvg_context * context, int64_t src, int64_t dst, int64_t p0, int64_t p1) {
    return on_context(context, [&](class context & c) { c.cache().seq_cp(src, dst, p0, p1); });
}

kvg_status kvg_kv_seq_keep(kvg_context * context, int64_t seq) {
    return on_context(context, [&](class context & c) { c.cache().seq_keep(seq); });
}

kvg_status kvg_kv_seq_add(kvg_context * context, int64_t seq, int64_t p0, int64_t p1, int64_t delta) {
    return on_context(context, [&](class context & c) { c.upkeep().seq_add(seq, p0, p1, delta); });
}

kvg_status kvg_kv_seq_div(kvg_context * context, int64_t seq, int64_t p0, int64_t p1, int64_t d) {
    return on_context(context, [&](class context & c) { c.upkeep().seq_div(seq, p0, p1, d); });
}

kvg_status kvg_kv_seq_pos_min(const kvg_context * context, int64_t seq, int64_t * out) {
    return guarded([&] { need(out, "out") = cache_of(context).seq_pos_min(seq); });
}

kvg_status kvg_kv_seq_pos_max(const kvg_context * context, int64_t seq, int64_t * out) {
    return guarded([&] { need(out, "out") = cache_of(context).seq_pos_max(seq); });
}

kvg_status kvg_kv_seq_lost(const kvg_context * context, int64_t group, int32_t * out) {
    return guarded([&] {
        const cells & cells = group_of(context, group).cells();
        need(out, "out");
        for (uint32_t s = 0; s < cells.n_seq_max(); ++s) {
            out[s] = cells.lost(s);
        }
    });
}

kvg_status kvg_kv_seq_bounds(const kvg_context * context, int32_t * pos_min, int32_t * pos_max, int32_t * n_cells) {
    return guarded([&] {
        const kv_cache & cache = cache_of(context);
        need(pos_min, "pos_min"), need(pos_max, "pos_max"), need(n_cells, "n_cells");
        for (uint32_t s = 0; s < cache.n_seq_max(); ++s) {
            pos_min[s] = cache.seq_pos_min(s);
            pos_max[s] = cache.seq_pos_max(s);
            n_cells[s] = static_cast<int32_t>(cache.seq_n_cells(s));
        }
    });
}

kvg_status kvg_kv_seq_count(const kvg_context * context, int64_t seq, int64_t p0, int64_t p1, int64_t * n_cells,
                            int64_t * n_shared) {
    return guarded([&] {
        const seq_count count = cache_of(context).count(seq, p0, p1);
        need(n_cells, "n_cells") = count.n;
        need(n_shared, "n_shared") = count.n_shared;
    });
}

kvg_status kvg_kv_seq_cells(const kvg_context * context, int64_t seq, int64_t group, int64_t p0, int32_t * cells, int32_t * pos,
                            int64_t n, int64_t * n_there) {
    return guarded([&] {
        const class cells & all = group_of(context, group).cells();
        const std::vector<uint32_t> found = all.of_seq(seq, p0);
        need(n_there, "n_there") = static_cast<int64_t>(found.size());
        const auto wanted = static_cast<size_t>(bounded("n", n, 0, std::numeric_limits<int32_t>::max()));
        for (size_t i = 0; i < std::min(wanted, found.size()); ++i) {
            (&need(cells, "cells"))[i] = static_cast<int32_t>(found[i]);
            (&need(pos, "pos"))[i] = all.pos(found[i]);
        }
    });
}

kvg_status kvg_kv_hold(kvg_context * context, int64_t seq, int64_t p0, int64_t p1, kvg_hold * out) {
    return on_context(context, [&](class context & c) {
        kvg_hold & hold = need_struct(out, "out");
        const hold_range range = c.cache().hold(seq, p0, p1);
        hold = {sizeof(hold), range.id, range.p0, range.p1};
    });
}

kvg_status kvg_kv_attach(kvg_context * context, int64_t hold, int64_t seq, int64_t p1) {
    return on_context(context, [&](class context & c) { c.cache().attach(hold, seq, p1); });
}

kvg_status kvg_kv_release(kvg_context * context, int64_t hold) {
    return on_context(context, [&](class context & c) { c.cache().release(hold); });
}

kvg_status kvg_kv_held_cells(const kvg_context * context, int64_t hold, int64_t group, int32_t * cells, int64_t n,
                             int64_t * n_there) {
    return guarded([&] {
        const kv_cache & cache = cache_of(context);
        const auto last = static_cast<int64_t>(cache.groups().size()) - 1;
        const class cells & of = cache.groups()[static_cast<size_t>(bounded("group", group, 0, last))].cells();
        cache.require_hold(hold);
        const std::vector<uint32_t> found = of.has_hold(hold) ? of.held(hold) : std::vector<uint32_t>();
        need(n_there, "n_there") = static_cast<int64_t>(found.size());
        for (int64_t i = 0; cells && i < std::min(n, *n_there); ++i) {
            cells[i] = static_cast<int32_t>(found[static_cast<size_t>(i)]);
        }
    });
}

kvg_status kvg_kv_held_state(const kvg_context * context, int64_t hold, int64_t * row) {
    return guarded([&] {
        const kv_cache & cache = cache_of(context);
        cache.require_hold(hold);
        need(row, "row") = cache.states().has_hold(hold) ? int64_t{cache.states().held(hold)} : -1;
    });
}

kvg_status kvg_kv_resume_point(kvg_context * context, int64_t seq, int64_t p, kvg_hold * out) {
    return on_context(context, [&](class context & c) {
        kvg_hold & hold = need_struct(out, "out");
        const hold_range point = c.cache().resume_point(seq, p);
        hold = {sizeof(hold), point.id, point.p0, point.p1};
    });
}

kvg_status kvg_kv_checkpoint(kvg_context * context, int64_t seq, int64_t * p) {
    return on_context(context, [&](class context & c) { need(p, "p") = c.cache().keep_checkpoint(seq); });
}

kvg_status kvg_kv_checkpoints(const kvg_context * context, int64_t seq, int64_t * p, int64_t n, int64_t * n_there) {
    return guarded([&] {
        const std::vector<int32_t> found = cache_of(context).checkpoints(seq);
        need(n_there, "n_there") = static_cast<int64_t>(found.size());
        for (int64_t i = 0; i < n && i < static_cast<int64_t>(found.size()); ++i) {
            need(p, "p");
            p[i] = found[static_cast<size_t>(i)];
        }
    });
}

kvg_status kvg_kv_rewind(kvg_context * context, int64_t seq, int64_t p, int64_t * out) {
    return on_context(context, [&](class context & c) { need(out, "out") = c.cache().rewind(seq, p); });
}

kvg_status kvg_kv_clear(kvg_context * context, int32_t data) {
    return on_context(context, [&](class context & c) { c.clear(data != 0); });
}

kvg_status kvg_kv_defrag(kvg_context * context, int32_t policy) {
    return guarded([&] { need(context, "context").context.upkeep().request_defrag(policy); });
}

static void fill_stats(kvg_update_stats & out, kvg_update_stats stats) {
    stats.struct_size = sizeof(stats);
    out = stats;
}

kvg_status kvg_kv_update(kvg_context * context, kvg_update_stats * out) {
    return on_context(context, [&](class context & c) {
        kvg_update_stats * stats = out ? &need_struct(out, "out") : nullptr;
        const kvg_update_stats done = c.upkeep().update();
        if (stats) {
            fill_stats(*stats, done);
        }
    });
}

kvg_status kvg_kv_take_stats(kvg_context * context, kvg_update_stats * out) {
    return guarded([&] { fill_stats(need_struct(out, "out"), need(context, "context").context.upkeep().take_stats()); });
}

kvg_status kvg_kv_cells(const kvg_context * context, int64_t group, int32_t * pos, uint64_t * seq, int32_t * shift,
                        uint8_t * dither, uint32_t * n_holds) {
    return guarded([&] {
        const cells & cells = group_of(context, group).cells();
        const auto copy = [&](auto * out, auto value) {
            for (uint32_t i = 0; out && i < cells.size(); ++i) {
                out[i] = value(i);
            }
        };
        copy(pos, [&](uint32_t i) { return cells.pos(i); });
        copy(shift, [&](uint32_t i) { return cells.shift(i); });
        copy(dither, [&](uint32_t i) { return cells.dither(i); });
        copy(n_holds, [&](uint32_t i) { return cells.n_holds(i); });
        if (seq) {
            std::copy_n(cells.words(0), size_t{cells.size()} * cells.n_words(), seq);
        }
    });
}

kvg_status kvg_kv_compose(kvg_context * context, int64_t seq, const kvg_kv_composite * groups, int64_t n_groups) {
    return on_context(context, [&](class context & c) {
        if (c.tells_distances()) {
            fail(KVG_UNSUPPORTED,
                 "this model tells distances by the positions of cells (ALiBi), and a composite cell has rows of "
                 "several positions: forget whole cells");
        }
        bounded("n_groups", n_groups, 0, static_cast<int64_t>(c.cache().groups().size()));
        for (int64_t g = 0; g < n_groups; ++g) {
            const kvg_kv_composite & in = need_struct(groups + g, "groups");
            need(in.cells, "groups->cells"), need(in.from, "groups->from");
        }
        c.transfer().compose(seq, groups, n_groups);
    });
}

kvg_status kvg_kv_state_layers(const kvg_context * context, int32_t * out) {
    return guarded([&] {
        const std::vector<uint32_t> & layers = cache_of(context).state_layers();
        std::copy(layers.begin(), layers.end(), &need(out, "out"));
    });
}

kvg_status kvg_kv_states(const kvg_context * context, int32_t * pos, uint64_t * seq, uint32_t * n_holds) {
    return guarded([&] {
        const kv_cache & cache = cache_of(context);
        const states & states = cache.states();
        const uint32_t n_words = (cache.n_seq_max() + 63) / 64;
        std::fill_n(pos, pos ? states.n_rows() : 0, -1);
        std::fill_n(seq, seq ? size_t{states.n_rows()} * n_words : 0, 0);
        std::fill_n(n_holds, n_holds ? states.n_rows() : 0, 0);
        const auto keep = [&](uint32_t row, int64_t next) {
            if (pos && row != states::NO_ROW) {
                pos[row] = static_cast<int32_t>(next - 1);
            }
        };
        for (uint32_t s = 0; states.any() && s < cache.n_seq_max(); ++s) {
            const uint32_t row = states.row_of(s);
            keep(row, cache.next_pos(s));
            if (seq && row != states::NO_ROW) {
                seq[size_t{row} * n_words + s / 64] |= uint64_t{1} << (s % 64);
            }
        }
        for (const kept_state & each : cache.kept_states()) {
            keep(each.row, each.p);
            if (n_holds) {
                ++n_holds[each.row];
            }
        }
    });
}

kvg_status kvg_kv_read(kvg_context * context, int64_t layer, int32_t v, float * out, uint64_t n_floats) {
    return on_context(context, [&](class context & c) { c.transfer().read(layer, v != 0, out, n_floats); });
}

kvg_status kvg_kv_read_rows(kvg_context * context, const kvg_kv_read_request * request) {
    return on_context(context, [&](class context & c) {
        const kvg_kv_read_request & want = need_struct(request, "request");
        need(want.cells, "request->cells"), need(want.data, "request->data"), need(want.dither, "request->dither");
        c.transfer().read_rows(want);
    });
}

kvg_status kvg_kv_pack(kvg_context * context, int64_t group, int64_t layer, const int32_t * cells, int64_t n_cells,
                       kvg_packed ** out) {
    return on_context(context, [&](class context & c) {
        need(out, "out") = nullptr;
        *out = new kvg_packed{c.transfer().pack(group, layer, &need(cells, "cells"), n_cells)};
    });
}

void kvg_packed_free(kvg_packed * packed) { delete packed; }

kvg_status kvg_kv_replace(kvg_context * context, int64_t seq, const kvg_kv_rows * groups, int64_t n_groups,
                          const kvg_kv_checkpoint_list * checkpoints, const kvg_kv_state_list * states) {
    return on_context(context, [&](class context & c) {
        bounded("n_groups", n_groups, 0, static_cast<int64_t>(c.cache().groups().size()));
        for (int64_t g = 0; g < n_groups; ++g) {
            const kvg_kv_rows & in = need_struct(groups + g, "groups");
            need(in.pos, "groups->pos"), need(in.seq, "groups->seq"), need(in.dither, "groups->dither");
            need(in.data, "groups->data");
            if (in.packed) {
                need(in.which, "groups->which");
            }
        }
        const kvg_kv_checkpoint_list none = {sizeof(none), 0, nullptr, nullptr, nullptr};
        const kvg_kv_checkpoint_list & marks = checkpoints ? need_struct(checkpoints, "checkpoints") : none;
        if (marks.n > 0) {
            need(marks.seq, "checkpoints->seq"), need(marks.p, "checkpoints->p"), need(marks.lost, "checkpoints->lost");
        }
        const kvg_kv_state_list no_states = {sizeof(no_states), 0, nullptr, nullptr, nullptr, 0, nullptr};
        const kvg_kv_state_list & rows = states ? need_struct(states, "states") : no_states;
        if (rows.n > 0 || rows.n_rows > 0) {
            need(rows.seq, "states->seq"), need(rows.p, "states->p"), need(rows.row, "states->row");
            need(rows.data, "states->data");
        }
        c.transfer().replace(seq, groups, n_groups, marks, rows);
    });
}

kvg_status kvg_kv_read_state(const kvg_context * context, int64_t row, float * out) {
    return guarded([&] {
        const states & states = cache_of(context).states();
        bounded("row", row, 0, int64_t{states.n_rows()} - 1);
        states.rows().read(static_cast<uint32_t>(row), &need(out, "out"));
    });
}

kvg_status kvg_kv_checkpoint_states(const kvg_context * context, int64_t seq, int32_t * out) {
    return guarded([&] {
        const kv_cache & cache = cache_of(context);
        if (!cache.states().any()) {
            fail(KVG_INVALID_ARGUMENT, "no layer of this model has a state");
        }
        const std::vector<uint32_t> rows = cache.checkpoint_states(seq);
        std::copy(rows.begin(), rows.end(), rows.empty() ? out : &need(out, "out"));
    });
}

kvg_status kvg_kv_room(const kvg_context * context, int64_t seq, int64_t * out) {
    return guarded([&] {
        const kv_cache & cache = cache_of(context);
        need(out, "out");
        for (size_t g = 0; g < cache.groups().size(); ++g) {
            cells left = cache.groups()[g].cells();
            left.seq_rm(seq, 0, -1);
            out[g] = left.reuses() ? int64_t{left.n_available()} : -1;
        }
    });
}

kvg_status kvg_kv_checkpoint_cells(const kvg_context * context, int64_t seq, int64_t group, int32_t * lost, uint8_t * kept) {
    return guarded([&] {
        const cells & cells = group_of(context, group).cells();
        cache_of(context).checkpoints_lost(seq, static_cast<size_t>(group), &need(lost, "lost"));
        const std::vector<uint32_t> own = cells.own_holds(static_cast<uint32_t>(seq));
        for (uint32_t i = 0; i < cells.size(); ++i) {
            (&need(kept, "kept"))[i] = !own.empty() && own[i] > 0;
        }
    });
}

kvg_status kvg_kv_reserve(kvg_context * context, const kvg_kv_place * groups, int64_t n_groups, kvg_incoming ** out) {
    return on_context(context, [&](class context & c) {
        need(out, "out") = nullptr;
        bounded("n_groups", n_groups, 0, static_cast<int64_t>(c.cache().groups().size()));
        for (int64_t g = 0; g < n_groups; ++g) {
            const kvg_kv_place & place = need_struct(groups + g, "groups");
            need(place.pos, "groups->pos"), need(place.dither, "groups->dither");
        }
        auto handle = std::make_unique<kvg_incoming>();
        handle->context = context->owned;
        handle->cells = c.intake().reserve(groups, n_groups);
        *out = handle.release();
    });
}

kvg_status kvg_incoming_write(kvg_incoming * incoming, const kvg_incoming_rows * rows) {
    return guarded([&] {
        const kvg_incoming_rows & in = need_struct(rows, "rows");
        need(in.data, "rows->data");
        need(incoming, "incoming").cells->write(in);
    });
}

// Of that context, or its cells would be another's.
static incoming & incoming_of(const kvg_context * context, kvg_incoming * handle) {
    if (need(handle, "incoming").context != context->owned) {
        fail(KVG_INVALID_ARGUMENT, "these cells were reserved in another context");
    }
    return *handle->cells;
}

kvg_status kvg_kv_show(kvg_context * context, kvg_incoming * incoming, int64_t seq, const float * state) {
    return on_context(context, [&](class context &) { incoming_of(context, incoming).show(seq, state); });
}

kvg_status kvg_kv_show_text(kvg_context * context, kvg_incoming * incoming, int64_t seq, const float * state) {
    return on_context(context, [&](class context &) { incoming_of(context, incoming).show_text(seq, state); });
}

kvg_status kvg_kv_give_back(kvg_context * context, kvg_incoming * incoming) {
    return on_context(context, [&](class context &) { incoming_of(context, incoming).give_back(); });
}

void kvg_incoming_free(kvg_incoming * incoming) {
    if (incoming) {
        incoming->cells->abandon();
    }
    std::unique_ptr<kvg_incoming>{incoming}.reset();
}
