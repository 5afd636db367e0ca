#include "shift/k_shift.h"

#include <algorithm>
#include <set>

#include "device.h"
#include "error.h"
#include "fault.h"
#include "shift/on_cpu.h"
#include "shift/on_device.h"

namespace kvg {

namespace {

constexpr size_t MAX_DITHERS = 16; // each dither needs graph nodes of its own
constexpr size_t MIN_SHARED_BYTES =
    256 << 10; // of a layer, for each further thread: less is done before that thread has started

bool have_many_dithers(const rotation_list & list) {
    std::set<uint8_t> dithers;
    for (const row_rotation & t : list.rotations) {
        dithers.insert(t.from);
    }
    return dithers.size() > MAX_DITHERS;
}

[[noreturn]] void fail_half_way(const char * who) {
    fail(KVG_DEVICE, "the K-shift failed half way on %s: K can't be trusted any more; clear() the cache and decode again", who);
}

} // namespace

k_shift::k_shift(kv_group & group, const std::vector<layer_rotation> & layers) : group_(group), layers_(layers) {
    for (const kv_part & part : group.parts()) {
        if (!is_cpu(part.device) && !can_rotate_on_device(group, part, layers)) {
            unable_.insert(part.device);
        }
    }
}

void k_shift::run(int n_threads, const rotation_list & list) {
    if (!list.rows.empty() && !fault_active("shift-skip")) {
        rotate(n_threads, list);
    }
    for (const rotated_row & row : list.rows) {
        group_.cells().set_rotated(row.row, list.rotations[row.index].to);
    }
}

// Of a group whose rows age: fresh ones, and then old ones.
void k_shift::rotate_by_type(int n_threads, const rotation_list & list) {
    unfinished_rows rows(group_);
    for (const bool old : {false, true}) {
        rotation_list part = {list.rotations, {}};
        for (const rotated_row & row : list.rows) {
            if ((row.row >= group_.n_fresh()) == old) {
                part.rows.push_back({row.row - (old ? group_.n_fresh() : 0), row.index});
            }
        }
        if (part.rows.empty()) {
            continue;
        }
        row_rotator rotator(group_, layers_, part, old ? group_.types().old_k : group_.types().k, n_threads);
        for (const uint32_t il : group_.layers()) {
            const ggml_tensor * k = old ? group_.old_k(il) : group_.k(il);
            rotator.rotate(il, static_cast<uint8_t *>(k->data), k->nb[1]);
        }
    }
    rows.done();
}

void k_shift::rotate(int n_threads, const rotation_list & list) {
    if (group_.ages()) {
        rotate_by_type(n_threads, list);
        return;
    }
    const bool all_fetched =
        group_.types().k != GGML_TYPE_F32 && have_many_dithers(list); // the CPU can rotate them in any order
    row_rotator by_cpu(group_, layers_, list, group_.types().k, n_threads);
    std::vector<update_graph> graphs;
    std::vector<uint32_t> fetched; // layers
    for (const kv_part & part : group_.parts()) {
        const bool is_here = is_cpu(part.device);
        if (!is_here && !all_fetched && is_on(part.device)) {
            graphs.push_back(rotation_graph(group_, part, layers_, list));
            continue;
        }
        graphs.emplace_back("shift", part.layers.size());
        for (const uint32_t il : part.layers) {
            if (is_here && layers_[il].rotates()) {
                graphs.back().add(by_cpu.node(graphs.back().ctx(), il));
            } else if (layers_[il].rotates()) {
                fetched.push_back(il);
            }
        }
    }
    allocate_graphs(group_, graphs);
    unfinished_rows rows(group_);
    if (ggml_backend_t failed = compute_graphs(group_, graphs)) {
        fail_half_way(ggml_backend_name(failed));
    }
    for (const uint32_t il : fetched) {
        if (!computed([&] { return by_cpu.rotate_fetched(il); })) {
            fail_half_way(ggml_backend_dev_name(group_.part_of(il).device));
        }
    }
    rows.done();
}

void k_shift::rotate_copies(const std::vector<uint32_t> & cells, const layer_range & range, uint8_t * rows, uint8_t * dither,
                            int n_threads) const {
    std::transform(cells.begin(), cells.end(), dither, [&](uint32_t cell) { return group_.cells().dither(cell); });
    const rotation_list list = settle_copies(group_.cells(), cells);
    if (list.rows.empty()) {
        return;
    }
    const size_t enough = 1 + list.rows.size() * group_.k_row_bytes() / MIN_SHARED_BYTES;
    const int n_shared = static_cast<int>(std::min(static_cast<size_t>(n_threads), enough));
    row_rotator rotator(group_, layers_, list, group_.types().k, n_shared);
    for (size_t place = range.begin; place < range.end; ++place) {
        rotator.rotate(group_.layers()[place], rows, group_.k_row_bytes());
        rows += cells.size() * (group_.k_row_bytes() + group_.v_row_bytes());
    }
    for (const rotated_row & row : list.rows) {
        dither[row.row] = list.rotations[row.index].to;
    }
}

void k_shift::rotate_floats(uint32_t layer, float * k) const {
    const rotation_list list = settle(group_.cells(), false).rotated;
    if (!list.rows.empty()) {
        const size_t stride = size_t{group_.spec().n_head_kv} * group_.spec().head_dim_k * sizeof(float);
        row_rotator(group_, layers_, list, GGML_TYPE_F32, 1, false).rotate(layer, reinterpret_cast<uint8_t *>(k), stride);
    }
}

} // namespace kvg
