#include "memory/aging.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/kernel.h"
#include "error.h"
#include "memory/slots.h"

namespace kvg {

namespace {

static_assert(AGING_STEP == ATTEND_CHUNK, "attention reads chunks of one type where they are");

// How far before the end of the nearest of its sequences a cell stands.
int64_t age_of(const cells & cells, uint32_t i, const std::vector<int32_t> & ends) {
    int64_t age = std::numeric_limits<int64_t>::max();
    each_member(cells.words(i), cells.n_words(), [&](uint32_t seq) { age = std::min(age, int64_t{ends[seq]} - cells.pos(i)); });
    return age;
}

// The fresh cells that may age, the oldest first.
std::vector<uint32_t> oldest_first(const cells & cells) {
    std::vector<int32_t> ends;
    for (uint32_t seq = 0; seq < cells.n_seq_max(); ++seq) {
        ends.push_back(cells.seq_pos_max(seq));
    }
    std::vector<int64_t> ages(cells.n_fresh());
    std::vector<uint32_t> order;
    for (uint32_t i = 0; i < cells.n_fresh(); ++i) {
        if (!cells.is_empty(i) && !cells.is_reserved(i)) {
            ages[i] = age_of(cells, i, ends);
            order.push_back(i);
        }
    }
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return ages[a] > ages[b]; });
    return order;
}

uint32_t count_empty(const cells & cells, uint32_t begin, uint32_t end) {
    uint32_t n = end > std::max(begin, cells.n_kv()) ? end - std::max(begin, cells.n_kv()) : 0;
    for (uint32_t i = begin; i < std::min(end, cells.n_kv()); ++i) {
        n += cells.is_empty(i);
    }
    return n;
}

// K or V of a layer, in two tensors.
struct aging_rows {
    const ggml_tensor * fresh;
    const ggml_tensor * old;
    uint32_t n_fresh;

    const ggml_tensor * tensor_of(uint32_t cell) const { return cell < n_fresh ? fresh : old; }
    uint8_t * row_of(uint32_t cell) const {
        const ggml_tensor * rows = tensor_of(cell);
        return static_cast<uint8_t *>(rows->data) + (cell < n_fresh ? cell : cell - n_fresh) * rows->nb[1];
    }
};

// All rows are read before any is written. width: values of a row
void move_rows_of(const aging_rows & rows, const std::vector<cell_move> & moves, uint32_t width) {
    const row_kernel & kernel = kernels_here()[0]->rows;
    std::vector<std::vector<uint8_t>> read;
    std::vector<float> x(attend_padded(width));
    for (const cell_move & m : moves) {
        const uint8_t * from = rows.row_of(m.src);
        const ggml_type type = rows.tensor_of(m.src)->type;
        const ggml_tensor * to = rows.tensor_of(m.dst);
        if (type == to->type) {
            read.emplace_back(from, from + to->nb[1]);
        } else {
            kernel.to_floats(type, from, x.data(), width);
            kernel.from_floats(to->type, x.data(), read.emplace_back(to->nb[1]).data(), width);
        }
    }
    for (size_t i = 0; i < moves.size(); ++i) {
        std::memcpy(rows.row_of(moves[i].dst), read[i].data(), read[i].size());
    }
}

} // namespace

std::vector<cell_move> plan_aging(const cells & cells, uint32_t n) {
    const uint32_t n_fresh = cells.n_fresh();
    const uint32_t n_empty = count_empty(cells, 0, n_fresh);
    if (n_empty >= n) {
        return {};
    }
    std::vector<uint32_t> aging = oldest_first(cells);
    const auto n_most = static_cast<uint32_t>(aging.size());
    const std::vector<uint32_t> to =
        empty_cells(cells, n_fresh, cells.size(), std::min(n_most, std::max(n - n_empty, AGING_STEP)));
    std::vector<cell_move> moves;
    for (size_t i = 0; i < to.size(); ++i) {
        moves.push_back({aging[i], to[i]});
    }
    return moves;
}

std::vector<uint32_t> find_copies(const cells & cells, const std::vector<uint32_t> & copied, const char * what) {
    const uint32_t n_fresh = cells.n_fresh();
    const auto is_fresh = [&](uint32_t i) { return i < n_fresh; };
    const auto n = static_cast<uint32_t>(copied.size());
    const auto n_fresh_copied = static_cast<uint32_t>(std::count_if(copied.begin(), copied.end(), is_fresh));
    const std::vector<uint32_t> fresh = empty_cells(cells, 0, n_fresh, n_fresh_copied);
    const std::vector<uint32_t> old = empty_cells(cells, n_fresh, cells.size(), n - static_cast<uint32_t>(fresh.size()));
    if (fresh.size() + old.size() < n) {
        fail(KVG_CACHE_FULL,
             "%s needs %zu cells for copies of what has aged, and %zu of %u are empty; make room (kv.seq_rm, a "
             "ContextShift), or use a larger n_ctx",
             what, n - fresh.size(), old.size(), cells.size() - n_fresh);
    }
    std::vector<uint32_t> out;
    size_t next_fresh = 0;
    size_t next_old = 0;
    for (const uint32_t i : copied) {
        out.push_back(is_fresh(i) && next_fresh < fresh.size() ? fresh[next_fresh++] : old[next_old++]);
    }
    return out;
}

uint32_t count_holes(const cells & cells) {
    return cells.n_fresh() == 0 ? cells.n_kv() - cells.n_used()
                                : count_empty(cells, cells.n_fresh(), std::max(cells.n_fresh(), cells.n_kv()));
}

void move_rows(kv_group & group, const std::vector<cell_move> & moves) {
    for (const uint32_t layer : group.layers()) {
        move_rows_of({group.k(layer), group.old_k(layer), group.n_fresh()}, moves, group.spec().k_width());
        move_rows_of({group.v(layer), group.old_v(layer), group.n_fresh()}, moves, group.spec().v_width());
    }
}

} // namespace kvg
