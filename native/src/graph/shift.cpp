#include "graph/shift.h"

#include <algorithm>
#include <bitset>
#include <optional>

#include "cache/shift_plan.h"
#include "device.h"
#include "error.h"
#include "fault.h"
#include "graph/host_shift.h"
#include "graph/shift_graph.h"
#include "parallel.h"

namespace kvg {

namespace {

constexpr size_t MAX_DITHERS = 16; // each takes graph nodes of its own

// Of the cells that wait.
bool have_many_dithers(const cells & cells) {
    std::bitset<256> seen;
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        seen.set(cells.dither(i), seen.test(cells.dither(i)) || cells.turns_in_place(i));
    }
    return seen.count() > MAX_DITHERS;
}

[[noreturn]] void fail_half_way(const char * who) {
    fail(KVG_DEVICE, "the K-shift failed half way on %s: K can't be trusted any more; clear() the cache and decode again", who);
}

} // namespace

k_shift::k_shift(kv_cache & cache, const hparams & h, const device_freqs & factors) : cache_(cache), kept_(cache) {
    for (const kv_part & part : cache.parts()) {
        const auto found = factors.find(part.device);
        const rotation how = {h.rope, found == factors.end() ? nullptr : found->second, part.hadamard_k.get()};
        shares_.push_back({&part, how, is_cpu(part.device) || can_shift(cache, part, how)});
    }
}

bool k_shift::is_on(ggml_backend_dev_t device) const {
    const auto share = std::find_if(shares_.begin(), shares_.end(), [&](const auto & s) { return s.part->device == device; });
    return share == shares_.end() || share->on_device;
}

update_graph k_shift::build(const share & s, cpu_rotation * by_cpu) const {
    if (!is_cpu(s.part->device)) {
        return shift_graph(cache_, *s.part, s.how);
    }
    update_graph graph("shift", s.part->layers.size());
    for (uint32_t il : s.part->layers) {
        graph.add(by_cpu->node(graph.ctx(), cache_.k(il)));
    }
    return graph;
}

int32_t k_shift::frame_for(const pos_bounds & decoded) const {
    if (fault_active("shift-skip") || fault_active("shift-sign")) {
        return 0; // what isn't rotated can't show what a rotation does wrong
    }
    const cells & cells = cache_.cells();
    return choose_frame(cells, decoded, cells.n_shifted() == 0 ? 0 : kept_.room(cells));
}

void k_shift::set_frame(int32_t frame) {
    if (frame != 0) {
        kept_.keep(cache_, turned_by_frame(cache_.cells(), frame));
    }
    cache_.cells().set_frame(frame);
}

std::vector<row_turn> k_shift::turns_of_originals() const {
    const cells & cells = cache_.cells();
    std::vector<row_turn> turns;
    const uint8_t next = cells.next_dither();
    for (uint32_t i = 0; i < cells.n_kv(); ++i) {
        if (cells.shift(i) != 0 && !cells.turns_in_place(i)) {
            const int32_t by = cells.pos(i) + cells.frame() - kept_.place(cells.original(i));
            const uint8_t dither = kept_.dither(cells.original(i));
            turns.push_back({i, turned(by), dither, dither_after(dither, next)});
        }
    }
    return turns;
}

uint32_t k_shift::run(update_runner & runner, int n_threads) {
    cells & cells = cache_.cells();
    const uint32_t n_shifted = cells.n_shifted();
    if (n_shifted == 0) {
        return 0;
    }
    if (fault_active("shift-skip")) {
        cells.clear_shifts();
        return n_shifted;
    }
    const std::vector<row_turn> of_originals = turns_of_originals();
    turn(runner, of_originals, n_threads);
    cells.clear_shifts();
    for (const row_turn & turn : of_originals) {
        cells.set_source(turn.cell, cells.pos(turn.cell) + cells.frame(), turn.to);
    }
    return n_shifted;
}

void k_shift::turn(update_runner & runner, const std::vector<row_turn> & of_originals, int n_threads) {
    const std::vector<row_turn> in_place = turns_in_place(cache_.cells());
    const rotation & how = shares_.front().how; // by the CPU the same for all devices
    const bool are_all_fetched =
        cache_.type_k() != GGML_TYPE_F32 && have_many_dithers(cache_.cells()); // which the CPU takes as they come
    const auto is_fetched = [&](const share & s) { return !is_cpu(s.part->device) && (are_all_fetched || !s.on_device); };
    std::optional<cpu_rotation> by_cpu;
    if (std::any_of(shares_.begin(), shares_.end(), [&](const share & s) { return is_cpu(s.part->device) || is_fetched(s); })) {
        by_cpu.emplace(cache_, how, in_place, n_threads);
    }
    cpu_rotation from_originals(cache_, how, of_originals, n_threads);
    std::vector<update_graph> graphs;
    for (const share & s : shares_) {
        const bool is_idle = in_place.empty() || is_fetched(s);
        graphs.push_back(is_idle ? update_graph("shift", 1) : build(s, by_cpu ? &*by_cpu : nullptr));
    }
    allocate_graphs(runner, graphs);
    unfinished_rows rows(cache_);
    if (ggml_backend_t failed = compute_graphs(runner, graphs)) {
        fail_half_way(ggml_backend_name(failed));
    }
    for (const share & s : shares_) {
        const bool is_done = (in_place.empty() || !is_fetched(s) || on_host(s, *by_cpu, nullptr)) &&
                             (of_originals.empty() || on_host(s, from_originals, &kept_));
        if (!is_done) {
            fail_half_way(ggml_backend_dev_name(s.part->device));
        }
    }
    rows.done();
}

void k_shift::leave_frame(float * k) const {
    const cells & cells = cache_.cells();
    std::vector<row_turn> turns;
    for (uint32_t i = 0; i < cells.n_kv() && cells.frame() != 0; ++i) {
        turns.push_back({i, cells.is_empty(i) ? 0 : turned(-cells.frame()), 0, 0});
    }
    cpu_rotation rotation(cache_, shares_.front().how, turns, 1);
    for (size_t i = 0; i < turns.size(); ++i) {
        rotation.rotate_floats(i, k + i * cache_.n_head_kv() * cache_.head_dim(), 0);
    }
}

void k_shift::leave_frame(const std::vector<uint32_t> & which, uint8_t * rows, int n_threads) const {
    const cells & cells = cache_.cells();
    if (cells.frame() == 0) {
        return;
    }
    const auto has_original = [&](uint32_t i) { return cells.original(i) != cells::NO_ORIGINAL; };
    std::vector<row_turn> turns;
    for (uint32_t i : which) {
        if (has_original(i)) {
            turns.push_back(
                {i, turned(cells.pos(i) - kept_.place(cells.original(i))), kept_.dither(cells.original(i)), cells.dither(i)});
        } else {
            turns.push_back({i, cells.is_empty(i) ? 0 : turned(-cells.frame()), cells.dither(i), cells.dither(i)});
        }
    }
    cpu_rotation rotation(cache_, shares_.front().how, turns, n_threads);
    const size_t row = cache_.k(0)->nb[1];
    const size_t layer = which.size() * (row + cache_.v(0)->nb[1]);
    const auto n_shares = static_cast<size_t>(n_threads);
    parallel_for(n_shares, n_shares, [&](size_t thread) {
        for (size_t i = thread; i < which.size() * cache_.n_layer(); i += n_shares) {
            const size_t at = i % which.size();
            uint8_t * k = rows + i / which.size() * layer + at * row;
            if (has_original(which[at])) {
                kept_.read_row(cells.original(which[at]), static_cast<uint32_t>(i / which.size()), k);
            }
            rotation.rotate(at, k, static_cast<int>(thread));
        }
    });
}

bool k_shift::on_host(const share & s, cpu_rotation & rotation, const originals * kept) {
    return computed([&] { return shift_on_host(cache_, *s.part, rotation, kept); });
}

} // namespace kvg
