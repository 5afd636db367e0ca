#include "runtime/inputs.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvg {

cell_span attended_span(const cells & cells, const batch & batch, const micro_batch & ubatch, uint32_t align) {
    constexpr int32_t ABSENT = std::numeric_limits<int32_t>::max();
    std::vector<int32_t> lowest(cells.n_seq_max(), ABSENT); // position that a token of each sequence sees
    for (uint32_t i = ubatch.begin; i < ubatch.begin + ubatch.n; ++i) {
        const int32_t first = cells.first_seen(batch.positions()[i]);
        each_member(batch.set(i).data(), batch.set(i).size(),
                    [&](uint32_t seq) { lowest[seq] = std::min(lowest[seq], first); });
    }
    uint32_t begin = cells.size(); // the span is not empty: the micro-batch's own cells are in it
    uint32_t end = 0;
    for (uint32_t seq = 0; seq < cells.n_seq_max(); ++seq) {
        if (lowest[seq] != ABSENT) {
            const cell_span span = cells.span_from(seq, lowest[seq]);
            begin = std::min(begin, span.begin);
            end = std::max(end, span.begin + span.n);
        }
    }
    begin = begin / align * align;
    return {begin, (end + align - 1) / align * align - begin};
}

void graph_inputs::set_temperatures(ggml_tensor * tensor, const batch & batch, const micro_batch & ubatch) {
    temperatures_.clear();
    for (uint32_t i = ubatch.begin; i < ubatch.begin + ubatch.n; ++i) {
        const float pos = static_cast<float>(batch.positions()[i]) + temperature_.offset;
        const double step = std::floor(pos / temperature_.length);
        temperatures_.push_back(static_cast<float>(1.0 + temperature_.scale * std::log(step + 1.0)));
    }
    ggml_backend_tensor_set(tensor, temperatures_.data(), 0, temperatures_.size() * sizeof(float));
}

void graph_inputs::set_states(decode_graph & graph, const state_segments & segments) {
    size_t first = 0;
    for (const state_inputs & group : graph.states) {
        ggml_backend_tensor_set(group.from, segments.from.data() + first, 0, ggml_nbytes(group.from));
        ggml_backend_tensor_set(group.to, segments.to.data() + first, 0, ggml_nbytes(group.to));
        first += static_cast<size_t>(group.from->ne[0]);
    }
    if (graph.order) {
        std::vector<int32_t> places(segments.order.size());
        for (size_t i = 0; i < places.size(); ++i) {
            places[static_cast<size_t>(segments.order[i])] = static_cast<int32_t>(i);
        }
        ggml_backend_tensor_set(graph.order, segments.order.data(), 0, ggml_nbytes(graph.order));
        if (graph.places->buffer) { // not where only states matter
            ggml_backend_tensor_set(graph.places, places.data(), 0, ggml_nbytes(graph.places));
        }
    }
}

// The token that the sequences of another one had one position before it, among those of the batch from `begin` on; -1: none.
static int64_t previous_of(const batch & batch, uint32_t i, uint32_t begin) {
    for (uint32_t j = i; j-- > begin;) {
        if (batch.positions()[j] == batch.positions()[i] - 1 && meets(batch.set(j), batch.set(i))) {
            return j;
        }
    }
    return -1;
}

// A token whose state before it is not known, as of a text's first one, begins with zeros.
void graph_inputs::set_previous(decode_graph & graph, const last_states & last, const batch & batch,
                                const micro_batch & ubatch) {
    const auto n_embd = static_cast<size_t>(graph.hidden->ne[0]);
    previous_ids_.clear();
    states_.clear();
    for (uint32_t i = ubatch.begin; i < ubatch.begin + ubatch.n; ++i) {
        const int64_t previous = previous_of(batch, i, ubatch.begin);
        if (previous >= 0) {
            previous_ids_.push_back(static_cast<int32_t>(ubatch.n + previous - ubatch.begin));
            continue;
        }
        const float * state = nullptr;
        each_member(batch.set(i).data(), batch.set(i).size(),
                    [&](uint32_t seq) { state = state ? state : last.before(seq, batch.positions()[i]); });
        previous_ids_.push_back(static_cast<int32_t>(states_.size() / n_embd));
        states_.resize(states_.size() + n_embd, 0.0f);
        if (state) {
            std::copy_n(state, n_embd, states_.end() - static_cast<std::ptrdiff_t>(n_embd));
        }
    }
    ggml_backend_tensor_set(graph.previous, previous_ids_.data(), 0, previous_ids_.size() * sizeof(int32_t));
    ggml_backend_tensor_set(graph.hidden, states_.data(), 0, states_.size() * sizeof(float));
}

void graph_inputs::set_positions(const cells & cells, const batch & batch, const micro_batch & ubatch, const cell_span & span,
                                 attended_cells & attended) {
    attended.cell_positions.resize(span.n);
    for (uint32_t i = 0; i < span.n; ++i) {
        const uint32_t c = span.begin + (attended.order.empty() ? i : attended.order[i]);
        attended.cell_positions[i] = c < cells.n_kv() ? cells.pos(c) : 0;
    }
    const int32_t * positions = batch.positions() + ubatch.begin;
    attended.token_positions.assign(positions, positions + ubatch.n);
}

void graph_inputs::set_mask(ggml_tensor * mask, const cells & cells, const batch & batch, const micro_batch & ubatch,
                            const cell_span & span, attended_cells & attended) {
    attended.order.clear();
    if (attended.goes_by_order) {
        seq_set seqs = batch.set(ubatch.begin);
        for (uint32_t i = ubatch.begin + 1; i < ubatch.begin + ubatch.n; ++i) {
            for (size_t w = 0; w < seqs.size(); ++w) {
                seqs[w] |= batch.set(i)[w];
            }
        }
        attended.order = rising_order(cells, seqs, span);
    }
    mask_.write(mask, cells, batch, ubatch.begin, ubatch.n, span, attended.order, tells_distances_ && !attended.goes_by_order);
    if (attended.has_own && tells_distances_) {
        set_positions(cells, batch, ubatch, span, attended);
    }
    if (attended.has_own) {
        attended.ranges.find(static_cast<const uint16_t *>(mask->data), ubatch.n, span.n);
    }
}

void graph_inputs::set(decode_graph & graph, const kv_cache & cache, const batch & batch, const micro_batch & ubatch,
                       const reservation * reserved, const std::vector<cell_span> & spans, const state_segments & segments,
                       std::vector<attended_cells> & attended) {
    if (graph.tokens) {
        ggml_backend_tensor_set(graph.tokens, batch.tokens() + ubatch.begin, 0, ubatch.n * sizeof(int32_t));
    } else { // of a stage
        const int64_t n_embd = graph.hidden->ne[0];
        ggml_backend_tensor_set(graph.hidden, batch.hidden() + ubatch.begin * n_embd, 0, ggml_nbytes(graph.hidden));
    }
    if (graph.positions) {
        ggml_backend_tensor_set(graph.positions, batch.positions() + ubatch.begin, 0, ubatch.n * sizeof(int32_t));
    }
    if (graph.temperatures) {
        set_temperatures(graph.temperatures, batch, ubatch);
    }
    if (graph.outputs) {
        output_ids_.clear();
        for (uint32_t i = 0; i < ubatch.n; ++i) {
            if (batch.is_output(ubatch.begin + i)) {
                output_ids_.push_back(static_cast<int32_t>(i));
            }
        }
        if (output_ids_.empty()) { // the graph has one all the same, which nobody asked for
            output_ids_.push_back(static_cast<int32_t>(ubatch.n - 1));
        }
        ggml_backend_tensor_set(graph.outputs, output_ids_.data(), 0, output_ids_.size() * sizeof(int32_t));
    }
    set_states(graph, segments);
    for (size_t g = 0; g < graph.groups.size(); ++g) {
        if (graph.groups[g].slots) {
            const uint32_t * slots = reserved->slots(g).data() + ubatch.begin;
            slot_ids_.assign(slots, slots + ubatch.n);
            ggml_backend_tensor_set(graph.groups[g].slots, slot_ids_.data(), 0, slot_ids_.size() * sizeof(int64_t));
        }
        if (graph.groups[g].mask) {
            set_mask(graph.groups[g].mask, cache.groups()[g].cells(), batch, ubatch, spans[g], attended[g]);
        }
    }
}

} // namespace kvg
