#include "shift/shift.h"

#include <algorithm>
#include <bitset>
#include <optional>

#include "device.h"
#include "error.h"
#include "fault.h"
#include "shift/host_shift.h"
#include "shift/shift_graph.h"
#include "shift/shift_plan.h"

namespace kvg {

namespace {

constexpr size_t MAX_DITHERS = 16;             // each takes graph nodes of its own
constexpr size_t MIN_SHARED_BYTES = 256 << 10; // of a layer: fewer take less time than another thread to start

// Of the cells that wait.
bool have_many_dithers(const cells & cells) {
    std::bitset<256> seen;
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        seen.set(cells.dither(i), seen.test(cells.dither(i)) || cells.shift(i) != 0);
    }
    return seen.count() > MAX_DITHERS;
}

[[noreturn]] void fail_half_way(const char * who) {
    fail(KVG_DEVICE, "the K-shift failed half way on %s: K can't be trusted any more; clear() the cache and decode again", who);
}

} // namespace

k_shift::k_shift(kv_group & group, const std::vector<layer_spec> & layers, const device_factors & factors) : group_(group) {
    for (const kv_part & part : group.parts()) {
        const rope_params & rope = layers[part.layers.front()].rope;
        const auto found = rope.with_factors ? factors.find(part.device) : factors.end();
        const rotation how = {rope, found == factors.end() ? nullptr : found->second, part.hadamard_k.get()};
        shares_.push_back({&part, how, is_cpu(part.device) || can_shift(group, part, how)});
    }
}

bool k_shift::is_on(ggml_backend_dev_t device) const {
    const auto share = std::find_if(shares_.begin(), shares_.end(), [&](const auto & s) { return s.part->device == device; });
    return share == shares_.end() || share->on_device;
}

update_graph k_shift::build(const share & s, cpu_rotation * by_cpu) const {
    if (!is_cpu(s.part->device)) {
        return shift_graph(group_, *s.part, s.how);
    }
    update_graph graph("shift", s.part->layers.size());
    for (uint32_t il : s.part->layers) {
        graph.add(by_cpu->node(graph.ctx(), group_.k(il)));
    }
    return graph;
}

uint32_t k_shift::run(int n_threads, const std::vector<uint32_t> & rotated) {
    cells & cells = group_.cells();
    if (fault_active("shift-skip")) {
        const uint32_t n_waiting = cells.n_shifted();
        cells.clear_shifts(waiting_cells(cells));
        return n_waiting;
    }
    if (rotated.empty()) {
        return 0;
    }
    const bool are_all = rotated.size() == cells.n_shifted();
    if (!are_all && !std::all_of(shares_.begin(), shares_.end(), [](const share & s) { return is_cpu(s.part->device); })) {
        fail(KVG_INTERNAL, "a device rotates all cells that wait, and not %zu of %u", rotated.size(), cells.n_shifted());
    }
    const bool are_all_fetched =
        group_.types().k != GGML_TYPE_F32 && have_many_dithers(cells); // which the CPU takes as they come
    const auto is_fetched = [&](const share & s) { return !is_cpu(s.part->device) && (are_all_fetched || !s.on_device); };
    std::optional<cpu_rotation> by_cpu;
    if (std::any_of(shares_.begin(), shares_.end(), [&](const share & s) { return is_cpu(s.part->device) || is_fetched(s); })) {
        by_cpu.emplace(group_, rotated, shares_.front().how, n_threads); // the same on all devices
    }
    std::vector<update_graph> graphs;
    for (const share & s : shares_) {
        graphs.push_back(is_fetched(s) ? update_graph("shift", 1) : build(s, by_cpu ? &*by_cpu : nullptr));
    }
    allocate_graphs(group_, graphs);
    unfinished_rows rows(group_);
    if (ggml_backend_t failed = compute_graphs(group_, graphs)) {
        fail_half_way(ggml_backend_name(failed));
    }
    for (const share & s : shares_) {
        if (is_fetched(s) && !computed([&] { return shift_on_host(group_, *s.part, *by_cpu); })) {
            fail_half_way(ggml_backend_dev_name(s.part->device));
        }
    }
    rows.done();
    cells.clear_shifts(rotated);
    return static_cast<uint32_t>(rotated.size());
}

void k_shift::run_on_copy(const std::vector<uint32_t> & cells, const layer_range & range, uint8_t * rows, uint8_t * dither,
                          int n_threads) const {
    std::vector<uint32_t> waiting;
    std::vector<size_t> places; // among the cells
    for (size_t i = 0; i < cells.size(); ++i) {
        dither[i] = group_.cells().dither(cells[i]);
        if (group_.cells().shift(cells[i]) != 0) {
            waiting.push_back(cells[i]);
            places.push_back(i);
        }
    }
    if (waiting.empty()) {
        return;
    }
    const uint8_t next = group_.cells().next_dither(waiting);
    const size_t row = group_.k_row_bytes();
    const size_t layer = cells.size() * (row + group_.v_row_bytes());
    const size_t enough = 1 + waiting.size() * row / MIN_SHARED_BYTES;
    const int n_shared = static_cast<int>(std::min(static_cast<size_t>(n_threads), enough));
    cpu_rotation rotation(group_, waiting, shares_.front().how, n_shared);
    for (size_t place = 0; place < range.size(); ++place) {
        rotation.rotate_all(0, waiting.size(), [&](size_t i) { return rows + place * layer + places[i] * row; });
    }
    for (const size_t place : places) {
        dither[place] = dither_after(dither[place], next);
    }
}

void k_shift::run_on_floats(float * k) const {
    const std::vector<uint32_t> waiting = waiting_cells(group_.cells());
    if (waiting.empty()) {
        return;
    }
    const cpu_rotation rotation(group_, waiting, shares_.front().how, 1, /*dithers*/ false);
    for (size_t i = 0; i < waiting.size(); ++i) {
        rotation.rotate_floats(i, k + size_t{waiting[i]} * group_.spec().n_head_kv * group_.spec().head_dim_k);
    }
}

} // namespace kvg
