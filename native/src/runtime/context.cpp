#include "runtime/context.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <set>

#include "device.h"
#include "error.h"
#include "fault.h"
#include "memory/cache_type.h"
#include "memory/move.h"
#include "memory/slots.h"
#include "runtime/placed_tokens.h"
#include "shift/shift_plan.h"

namespace kvg {

namespace {

constexpr int64_t MAX_CELLS =
    std::numeric_limits<int32_t>::max() - MAX_SPAN_ALIGN; // rows are padded, and indices go through int32
constexpr int64_t MAX_SEQ = 256;
constexpr int64_t MAX_THREADS = 512; // GGML_MAX_N_THREADS: beyond it ggml aborts

int64_t bounded(const char * name, int64_t value, int64_t lowest, int64_t highest) {
    if (value < lowest || value > highest) {
        fail(KVG_INVALID_ARGUMENT, "%s is %lld, expected %lld to %lld", name, static_cast<long long>(value),
             static_cast<long long>(lowest), static_cast<long long>(highest));
    }
    return value;
}

// Adds the graphs that run while it lives, and the time, to some stats.
class stopwatch {
public:
    stopwatch(const update_runner & runner, kvg_update_stats & stats)
        : runner_(runner), stats_(stats), graphs_(runner.n_graphs()), start_(std::chrono::steady_clock::now()) {}
    ~stopwatch() {
        stats_.graphs += runner_.n_graphs() - graphs_;
        stats_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }
    stopwatch(const stopwatch &) = delete;
    stopwatch & operator=(const stopwatch &) = delete;

private:
    const update_runner & runner_;
    kvg_update_stats & stats_;
    int64_t graphs_;
    std::chrono::steady_clock::time_point start_;
};

// Before anything is allocated.
void require_kept(const std::vector<ggml_backend_dev_t> & homes, const hparams & h, ggml_type type_k, ggml_type type_v) {
    for (ggml_backend_dev_t device : std::set<ggml_backend_dev_t>(homes.begin(), homes.end())) {
        if (!can_keep_on(device, h, {type_k, type_v})) {
            fail(
                KVG_UNSUPPORTED,
                "device %s can't write or move rows of %u values of K in %s and V in %s; use offload_kqv=False, another device "
                "or type_k/type_v=\"f16\"",
                ggml_backend_dev_name(device), h.n_embd_kv(), ggml_type_name(type_k), ggml_type_name(type_v));
        }
    }
}

} // namespace

context::context(std::shared_ptr<const model> model, const kvg_context_params & params) : model_(std::move(model)) {
    const auto n_cells = static_cast<uint32_t>(bounded("n_ctx", params.n_ctx, 1, MAX_CELLS));
    const auto n_seq_max = static_cast<uint32_t>(bounded("n_seq_max", params.n_seq_max, 1, MAX_SEQ));
    n_batch_ = static_cast<uint32_t>(bounded("n_batch", params.n_batch, 1, MAX_CELLS));
    n_ubatch_ = static_cast<uint32_t>(
        std::min<int64_t>({bounded("n_ubatch", params.n_ubatch, 1, MAX_CELLS), params.n_batch, params.n_ctx}));
    n_threads_ = static_cast<int>(bounded("n_threads", params.n_threads, 1, MAX_THREADS));
    n_threads_batch_ = static_cast<int>(bounded("n_threads_batch", params.n_threads_batch, 1, MAX_THREADS));
    bounded("flash_attn", params.flash_attn, KVG_FLASH_ATTN_AUTO, KVG_FLASH_ATTN_ON);
    if (params.defrag_threshold != params.defrag_threshold) {
        fail(KVG_INVALID_ARGUMENT, "defrag_threshold is not a number");
    }
    defrag_threshold_ = params.defrag_threshold;
    const ggml_type type_k = cache_type("type_k", params.type_k, model_->hparams().head_dim);
    const ggml_type type_v = cache_type("type_v", params.type_v, model_->hparams().head_dim);

    const hadamard_sizes rotated =
        params.hadamard ? choose_hadamard(model_->hparams().head_dim, type_k, type_v) : hadamard_sizes{0, 0};
    const placement & placement = model_->placement();
    std::vector<ggml_backend_dev_t> homes; // of each layer's cells
    for (uint32_t il = 0; il < placement.n_layer(); ++il) {
        homes.push_back(params.offload_kqv ? placement.layer(il) : cpu_device());
        align_ = std::max(align_, span_align(homes.back()));
    }
    require_kept(homes, model_->hparams(), type_k, type_v);
    backends_ = std::make_unique<backends>(placement.devices());
    cache_ = std::make_unique<kv_cache>(homes, model_->hparams(), n_cells, n_seq_max, type_k, type_v, rotated,
                                        model_->is_measured());
    decoder_ = std::make_unique<decoder>(*model_, *cache_, *backends_,
                                         decoder_params{params.flash_attn, n_ubatch_, std::max(n_threads_, n_threads_batch_)});
    shift_ = std::make_unique<k_shift>(*cache_, model_->hparams(), model_->rope_freqs());
    ask_devices();
    if (!model_->is_measured()) {
        cache_->allocate();
    }
    reserve_graphs();
    if (!model_->is_measured()) {
        cache_->clear(true); // not before all is well: that is when the host's pages become real
    }
    std::vector<ggml_backend_t> lanes;
    for (const kv_part & part : cache_->parts()) {
        lanes.push_back(backends_->of(part.device));
    }
    runner_ = std::make_unique<update_runner>(lanes);
}

// What each device has of this context, and whether it can do what the cache takes.
void context::ask_devices() {
    const placement & placement = model_->placement();
    for (ggml_backend_dev_t device : placement.devices()) {
        context_part part = {device,
                             0,
                             0,
                             model_->bytes_on(device),
                             0,
                             0,
                             decoder_->attention_on(device),
                             shift_->is_on(device),
                             decoder_->refused_by(device)};
        for (uint32_t il = 0; il < placement.n_layer(); ++il) {
            part.n_layer += placement.layer(il) == device;
        }
        for (const kv_part & cells : cache_->parts()) {
            if (cells.device == device) {
                part.n_cache = static_cast<uint32_t>(cells.layers.size());
                part.cache_bytes = cache_->bytes_on(device);
            }
        }
        parts_.push_back(part);
    }
}

// Memory for the largest graph, if there is room for it beside a cache that is allocated and not touched yet. A kernel that overcommits
// would kill the process later.
void context::reserve_graphs() {
    graph_bytes_ = decoder_->estimate();
    for (size_t i = 0; i < graph_bytes_.size(); ++i) {
        ggml_backend_dev_t device = ggml_backend_get_device(backends_->all()[i]);
        if (has_room(device, graph_bytes_[i] + (is_cpu(device) ? cache_->bytes_on(device) : 0))) {
            continue;
        }
        if (model_->is_measured()) {
            return; // the estimate will have to do
        }
        fail(KVG_DEVICE, "graphs of %u tokens over %u cells need %s on %s and %s are free; use a smaller n_ubatch or n_ctx",
             n_ubatch_, cache_->cells().size(), format_bytes(graph_bytes_[i]).c_str(), ggml_backend_dev_name(device),
             format_bytes(device_memory(device).free).c_str());
    }
    decoder_->reserve();
    graph_bytes_.clear();
}

const std::vector<context_part> & context::parts() {
    const std::vector<size_t> sizes = graph_bytes_.empty() ? decoder_->sizes() : graph_bytes_;
    for (size_t i = 0; i < parts_.size(); ++i) {
        parts_[i].compute_bytes = sizes[i];
    }
    return parts_;
}

void context::require_intact() const {
    if (cache_->broken()) {
        fail(KVG_DEVICE,
             "an earlier update or load failed half way, so K and V can't be trusted: clear() the cache and decode again");
    }
}

void context::request_defrag(int32_t policy) {
    if (policy != KVG_DEFRAG_FILL && policy != KVG_DEFRAG_SORT) {
        fail(KVG_INVALID_ARGUMENT, "no defrag policy has number %d; there are fill (0) and sort (1)", policy);
    }
    defrag_pending_ = policy;
}

void context::seq_add(int64_t seq, int64_t p0, int64_t p1, int64_t delta) {
    reposition_cells(cache_->cells().check_add(seq, p0, p1, delta), "seq_add");
}

void context::seq_div(int64_t seq, int64_t p0, int64_t p1, int64_t d) {
    reposition_cells(cache_->cells().check_div(seq, p0, p1, d), "seq_div");
}

// A position is a property of the cell: those who share one keep it, and the sequence goes on with a copy. K and V are copied before
// any cell changes.
void context::reposition_cells(const reposition & change, const char * op) {
    cells & cells = cache_->cells();
    const std::vector<uint32_t> shared = cells.shared_in(change);
    if (!shared.empty()) {
        require_intact();
        const std::vector<uint32_t> slots = find_slots(cells, static_cast<uint32_t>(shared.size()), op);
        std::vector<cell_move> copies;
        for (size_t i = 0; i < shared.size(); ++i) {
            copies.push_back({shared[i], slots[i]});
            cells.touch(slots[i]);
        }
        backends_->set_threads(n_threads_batch_);
        run_copy(*runner_, *cache_, copies);
        for (const cell_move & copy : copies) {
            cells.fork(copy.src, copy.dst, change.seq);
        }
    }
    cells.apply(change);
}

void context::clear(bool data) {
    cache_->clear(data);
    defrag_pending_ = NO_DEFRAG;
}

uint32_t context::shift_now() {
    const cells & cells = cache_->cells();
    const uint32_t n =
        shift_->run(*runner_, n_threads_batch_, decoder_->can_turn_queries() ? cells_to_rotate(cells) : waiting_cells(cells));
    settled_ = cells.shift_version();
    return n;
}

// Returns the number of cells moved.
uint32_t context::compact(int32_t policy) {
    size_t n_moved = 0;
    if (policy == KVG_DEFRAG_SORT) {
        const auto steps = plan_sort(cache_->cells(), sort_ranks(*cache_));
        run_sort(*runner_, *cache_, steps);
        for (const std::vector<cell_move> & step : steps) {
            n_moved += step.size();
        }
    } else if (policy == KVG_DEFRAG_FILL) {
        const std::vector<cell_move> moves = plan_fill(cache_->cells());
        run_fill(*runner_, *cache_, moves);
        n_moved = moves.size();
    }
    return static_cast<uint32_t>(n_moved);
}

void context::flush(int32_t policy, kvg_update_stats & stats) {
    require_intact();
    stats.waiting_cells = cache_->cells().n_shifted();
    if (policy == NO_DEFRAG && cache_->cells().shift_version() == settled_) {
        return; // as for nearly every token of a generation
    }
    const stopwatch timed(*runner_, stats);
    backends_->set_threads(n_threads_batch_);
    const bool may_wait = decoder_->can_turn_queries(); // depending on where cells lie, so after they moved
    stats.shifted_cells += may_wait ? 0 : shift_now();
    const uint32_t n_moved = compact(policy);
    stats.moved_cells += n_moved;
    stats.moved_bytes += static_cast<int64_t>(n_moved * cache_->cell_bytes());
    defrag_pending_ = policy == NO_DEFRAG ? defrag_pending_ : NO_DEFRAG;
    stats.shifted_cells += may_wait ? shift_now() : 0;
    stats.waiting_cells = cache_->cells().n_shifted();
}

kvg_update_stats context::update() {
    kvg_update_stats stats = {};
    flush(defrag_pending_, stats);
    return stats;
}

kvg_update_stats context::take_stats() {
    const kvg_update_stats stats = flushed_;
    flushed_ = {};
    return stats;
}

void context::read(int64_t layer, bool v, float * out, uint64_t n_floats) {
    bounded("layer", layer, 0, static_cast<int64_t>(cache_->n_layer()) - 1);
    const uint64_t wanted = uint64_t{cache_->cells().size()} * model_->hparams().n_embd_kv();
    if (!out || n_floats != wanted) {
        fail(KVG_INVALID_ARGUMENT, "the buffer holds %llu floats, expected %llu", (unsigned long long) n_floats,
             (unsigned long long) wanted);
    }
    require_intact();
    if (!v) {
        flush(NO_DEFRAG, flushed_);
    }
    cache_->read(static_cast<uint32_t>(layer), v, out);
    if (!v) {
        shift_->run_on_floats(out);
    }
}

void context::read_rows(const int32_t * cells, uint64_t n_cells, uint8_t * out, uint64_t n_bytes, uint8_t * dither) {
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
    shift_->run_on_copy(rows, out, dither, n_threads_batch_);
}

// The cells with these in place of a sequence's, and where they are.
std::pair<cells, std::vector<uint32_t>> context::replaced(int64_t seq, const kvg_kv_rows & in) const {
    const uint32_t n_seq_max = cache_->cells().n_seq_max();
    cells next = cache_->cells();
    next.seq_rm(seq, 0, -1);
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
        next.set_dither(slots[i], in.dither[i]);
    }
    return {std::move(next), slots};
}

void context::replace(int64_t seq, const kvg_kv_rows & in) {
    bounded("n_cells", in.n_cells, 0, MAX_CELLS);
    if (in.n_bytes != static_cast<uint64_t>(in.n_cells) * cache_->cell_bytes()) {
        fail(KVG_INVALID_ARGUMENT, "%llu bytes of K and V, expected %llu for %lld cells", (unsigned long long) in.n_bytes,
             (unsigned long long) (static_cast<uint64_t>(in.n_cells) * cache_->cell_bytes()),
             static_cast<long long>(in.n_cells));
    }
    require_intact();
    auto [next, slots] = replaced(seq, in);
    unfinished_rows rows(*cache_); // some may be those of cells that are to be replaced
    cache_->write_rows(slots, in.data, n_threads_batch_);
    fault_point("load-write");
    rows.done();
    std::swap(cache_->cells(), next);
}

// Attends from the lowest to the highest cell of the micro-batch's sequences, padded as the device likes.
cell_span context::attended_span(const batch & batch, const micro_batch & ubatch) const {
    const cells & cells = cache_->cells();
    seq_set all = cells.make_set();
    for (uint32_t i = ubatch.begin; i < ubatch.begin + ubatch.n; ++i) {
        for (size_t w = 0; w < all.size(); ++w) {
            all[w] |= batch.set(i)[w];
        }
    }
    const cell_span span = cells.span_of(all); // not empty: the micro-batch's own cells are in it
    const uint32_t begin = span.begin / align_ * align_;
    const uint32_t end = (span.begin + span.n + align_ - 1) / align_ * align_;
    return {begin, end - begin};
}

void context::set_mask(decode_graph & graph, const batch & batch, const micro_batch & ubatch, const cell_span & span) {
    const cells & cells = cache_->cells();
    const ggml_fp16_t seen = ggml_fp32_to_fp16(0.0f);
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-std::numeric_limits<float>::infinity());
    // the scheduler keeps inputs with its last backend, the CPU
    if (!ggml_backend_buffer_is_host(graph.mask->buffer)) {
        fail(KVG_INTERNAL, "the mask is not in host memory");
    }
    auto * mask = static_cast<ggml_fp16_t *>(graph.mask->data);
    std::fill_n(mask, static_cast<size_t>(span.n) * ubatch.n, hidden);
    const uint32_t end = std::min(span.begin + span.n, cells.n_kv());
    for (uint32_t i = 0; i < ubatch.n; ++i) {
        const seq_set & set = batch.set(ubatch.begin + i);
        const int32_t pos = batch.positions()[ubatch.begin + i];
        ggml_fp16_t * row = mask + static_cast<size_t>(i) * span.n;
        if (const cell_span run = cells.seen_run(set, pos); run.n > 0) { // as nearly every token of a generation
            std::fill_n(row + (run.begin - span.begin), run.n, seen);
            continue;
        }
        for (uint32_t c = span.begin; c < end; ++c) {
            if (cells.pos(c) <= pos && cells.meets(c, set)) {
                row[c - span.begin] = seen;
            }
        }
    }
}

void context::set_inputs(decode_graph & graph, const batch & batch, const micro_batch & ubatch,
                         const std::vector<uint32_t> & slots, const cell_span & span) {
    ggml_backend_tensor_set(graph.tokens, batch.tokens() + ubatch.begin, 0, ubatch.n * sizeof(int32_t));
    ggml_backend_tensor_set(graph.positions, batch.positions() + ubatch.begin, 0, ubatch.n * sizeof(int32_t));
    slot_ids_.assign(slots.begin() + ubatch.begin, slots.begin() + ubatch.begin + ubatch.n);
    ggml_backend_tensor_set(graph.slots, slot_ids_.data(), 0, slot_ids_.size() * sizeof(int64_t));
    if (graph.outputs) {
        output_ids_.clear();
        for (uint32_t i = 0; i < ubatch.n; ++i) {
            if (batch.is_output(ubatch.begin + i)) {
                output_ids_.push_back(static_cast<int32_t>(i));
            }
        }
        ggml_backend_tensor_set(graph.outputs, output_ids_.data(), 0, output_ids_.size() * sizeof(int32_t));
    }
    if (graph.mask) {
        set_mask(graph, batch, ubatch, span);
    }
}

const decode_graph & context::compute(const batch & batch, const micro_batch & ubatch, const std::vector<uint32_t> & slots) {
    const cell_span span = attended_span(batch, ubatch);
    decode_graph & graph = decoder_->prepare(ubatch.n, ubatch.n_outputs, span);
    set_inputs(graph, batch, ubatch, slots, span);
    backends_->set_threads(ubatch.n == 1 ? n_threads_ : n_threads_batch_);
    decoder_->compute();
    n_attended_ = std::min(span.n, cache_->cells().size() - span.begin);
    return graph;
}

// The last micro-batch's, from a row on.
void context::write_outputs(const decode_graph & graph, const kvg_output & output, size_t row) const {
    if (output.embd) {
        ggml_backend_tensor_get(graph.embd, output.embd + row * model_->hparams().n_embd, 0, ggml_nbytes(graph.embd));
    }
    if (output.logits) {
        ggml_backend_tensor_get(graph.logits, output.logits + row * model_->hparams().n_vocab, 0, ggml_nbytes(graph.logits));
    }
}

// What the softmax of a row says.
static kvg_score score_of(const float * logits, uint32_t n_vocab) {
    const softmax_parts parts = attend_kernels_here()[0]->softmax(logits, n_vocab);
    const float log_sum = std::log(parts.sum); // of what is relative to the greatest
    return {static_cast<int32_t>(parts.best), -log_sum, parts.greatest + log_sum};
}

int64_t context::decode(const kvg_batch & in, const kvg_output * output) {
    decoded_.clear();
    require_intact();
    cells & cells = cache_->cells();
    const batch batch(in, model_->hparams().n_vocab, n_batch_, cells);
    require_room(cells, batch.n_tokens(), "the batch"); // before anything moves
    if (output && output->n_rows < batch.n_outputs()) {
        fail(KVG_INVALID_ARGUMENT, "%u outputs are asked for and the buffers have room for %lld", batch.n_outputs(),
             static_cast<long long>(output->n_rows));
    }
    if (output && output->score && !output->logits) {
        fail(KVG_INVALID_ARGUMENT, "a score is asked for without logits");
    }
    const float holes = static_cast<float>(cells.n_kv() - cells.n_used());
    const bool fragmented = defrag_threshold_ >= 0 && holes > defrag_threshold_ * static_cast<float>(cells.n_kv());
    flush(defrag_pending_ == NO_DEFRAG && fragmented ? KVG_DEFRAG_FILL : defrag_pending_, flushed_);
    decoder_->set_turns();

    fault_point("cells");
    const std::vector<uint32_t> slots = find_slots(cells, batch.n_tokens(), "the batch");
    placed_tokens placed(cells, slots);
    size_t row = 0;
    for (uint32_t begin = 0; begin < batch.n_tokens(); begin += n_ubatch_) {
        micro_batch ubatch = {begin, std::min(n_ubatch_, batch.n_tokens() - begin), 0};
        for (uint32_t i = begin; i < begin + ubatch.n; ++i) {
            ubatch.n_outputs += batch.is_output(i);
        }
        placed.put(batch, begin, ubatch.n);
        const decode_graph & graph = compute(batch, ubatch, slots);
        if (output && ubatch.n_outputs > 0) {
            write_outputs(graph, *output, row);
            row += ubatch.n_outputs;
        }
    }
    if (output && output->score && row > 0) {
        *output->score = score_of(output->logits + (row - 1) * model_->hparams().n_vocab, model_->hparams().n_vocab);
    }
    decoded_ = batch.first_positions();
    placed.keep();
    return static_cast<int64_t>(row);
}

void context::undo_decode() {
    for (const first_position & first : decoded_) {
        cache_->cells().seq_rm(first.seq, first.pos, -1);
    }
    decoded_.clear();
}

int64_t context::append(int64_t seq, int64_t token, const kvg_output * output) {
    decoded_.clear();
    const int64_t last = cache_->cells().seq_pos_max(seq);
    const auto id = static_cast<int32_t>(bounded("token", token, 0, int64_t{model_->hparams().n_vocab} - 1));
    const auto pos = static_cast<int32_t>(bounded("position", last + 1, 0, std::numeric_limits<int32_t>::max()));
    const auto seq_id = static_cast<int32_t>(seq);
    const int32_t seq_begin[] = {0, 1};
    const uint8_t wanted = 1;
    return decode({sizeof(kvg_batch), 1, &id, &pos, seq_begin, &seq_id, &wanted}, output);
}

} // namespace kvg
