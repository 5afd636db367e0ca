// The only conductor: decides what runs when, and undoes what didn't come to an end.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ggml-cpp.h>

#include "backends.h"
#include "graph/decoder.h"
#include "kvgraph.h"
#include "memory/kv_cache.h"
#include "memory/update_graph.h"
#include "model/weights.h"
#include "runtime/batch.h"
#include "shift/shift.h"

namespace kvg {

// What a context has on one device.
struct context_part {
    ggml_backend_dev_t device;
    uint32_t n_layer;      // whose weights are there
    uint32_t n_cache;      // whose cells are there
    uint64_t weight_bytes; // what is mapped from the file included
    uint64_t cache_bytes;
    uint64_t compute_bytes;
    std::string attention; // "flash", "plain", "attend"; "" without cells
    bool shift_on_device;  // else the CPU rotates K for it; true without cells
    std::string fallbacks; // operations that its layers need and the CPU does: "ROPE, SOFT_MAX"
};

class context {
public:
    // Asks the devices and checks the room they have before it allocates. On a model that is only measured, the cache has no memory, and
    // nothing but parts() may be called. error(KVG_INVALID_ARGUMENT), error(KVG_DEVICE), error(KVG_UNSUPPORTED)
    context(std::shared_ptr<const model> model, const kvg_context_params & params);

    // returns the rows that it wrote
    int64_t decode(const kvg_batch & batch, const kvg_output * output);
    // one token, at the end of its sequence
    int64_t append(int64_t seq, int64_t token, const kvg_output * output);
    // takes the tokens of the last decode out again; nothing when it failed or was undone
    void undo_decode();
    // K-shift, then defrag, as far as each is pending; cells that attention turns queries for go on waiting
    kvg_update_stats update();
    // what decode and read flushed by themselves since the last call
    kvg_update_stats take_stats();

    // Other metadata operations go straight to the cells. These two give shared cells a copy of their own first.
    // error(KVG_CACHE_FULL) when there is no room for the copies: nothing changed.
    void seq_add(int64_t seq, int64_t p0, int64_t p1, int64_t delta);
    void seq_div(int64_t seq, int64_t p0, int64_t p1, int64_t d);
    kv_cache & cache() { return *cache_; }
    const kv_cache & cache() const { return *cache_; }
    bool can_shift() const { return model_->hparams().rope.n_rot > 0; }
    void request_defrag(int32_t policy);
    void clear(bool data);
    void read(int64_t layer, bool v, float * out, uint64_t n_floats);
    // Raw K and V of cells, rotated to their positions: for each layer K then V, a row per cell. dither: what each K carries then
    void read_rows(const int32_t * cells, uint64_t n_cells, uint8_t * out, uint64_t n_bytes, uint8_t * dither);
    // Replaces the cells of a sequence (seq < 0: every cell) by these: pos (n), seq (n, n_seq_max) of 0/1, rows as read_rows gives
    // them. All or nothing, but when the device fails while rows are written: then the cache is broken().
    void replace(int64_t seq, const kvg_kv_rows & rows);
    uint32_t n_attended() const { return n_attended_; }
    double graph_seconds() const { return decoder_->seconds(); }
    // one for each device that has anything, the CPU last
    const std::vector<context_part> & parts();

private:
    std::pair<cells, std::vector<uint32_t>> replaced(int64_t seq, const kvg_kv_rows & rows) const;
    struct micro_batch {
        uint32_t begin; // first token
        uint32_t n;
        uint32_t n_outputs;
    };

    static constexpr int32_t NO_DEFRAG = -1;

    void reposition_cells(const reposition & change, const char * op);
    uint32_t compact(int32_t policy);
    void ask_devices();
    void reserve_graphs();
    void require_intact() const;
    uint32_t shift_now();
    void flush(int32_t policy, kvg_update_stats & stats);
    cell_span attended_span(const batch & batch, const micro_batch & ubatch) const;
    void set_inputs(decode_graph & graph, const batch & batch, const micro_batch & ubatch, const std::vector<uint32_t> & slots,
                    const cell_span & span);
    void set_mask(decode_graph & graph, const batch & batch, const micro_batch & ubatch, const cell_span & span);
    const decode_graph & compute(const batch & batch, const micro_batch & ubatch, const std::vector<uint32_t> & slots);
    void write_outputs(const decode_graph & graph, const kvg_output & output, size_t row) const;

    std::shared_ptr<const model> model_;
    uint32_t n_batch_;
    uint32_t n_ubatch_;
    int n_threads_;
    int n_threads_batch_;
    float defrag_threshold_;
    int32_t defrag_pending_ = NO_DEFRAG; // or a kvg_defrag_policy
    uint32_t n_attended_ = 0;
    uint32_t align_ = 1;

    std::unique_ptr<backends> backends_;
    std::unique_ptr<kv_cache> cache_;
    std::unique_ptr<update_runner> runner_;
    std::unique_ptr<k_shift> shift_;
    std::unique_ptr<decoder> decoder_;
    std::vector<context_part> parts_;
    std::vector<size_t> graph_bytes_; // estimated, when they were not reserved
    kvg_update_stats flushed_ = {};
    uint64_t settled_ = 0; // the version of the cells' shifts that nothing needs to be done for

    std::vector<first_position> decoded_; // by the last decode, if it succeeded
    std::vector<int64_t> slot_ids_;       // scratch, kept
    std::vector<int32_t> output_ids_;
};

} // namespace kvg
