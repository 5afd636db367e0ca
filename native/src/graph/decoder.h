// The device side of decode: which attention each layer has, and the graphs of micro-batches, kept in memory.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends.h"
#include "graph/frame.h"
#include "graph/graph_cache.h"
#include "graph/recur.h"
#include "memory/kv_cache.h"
#include "model/weights.h"

namespace kvg {

struct decoder_params {
    int32_t flash_attn; // kvg_flash_attn
    uint32_t n_ubatch;
    uint32_t n_outputs; // most of one graph
    int max_threads;
};

class decoder {
public:
    // Nothing is allocated yet but the host's scratch. The others must outlive it. error(KVG_UNSUPPORTED)
    decoder(const model & model, const kv_cache & cache, const backends & backends, const decoder_params & params,
            std::vector<active_adapter> adapters);

    // About how many bytes the largest graph takes on each device, in the order of backends.
    std::vector<size_t> estimate();
    // bytes on each device, in the order of backends, when as many graphs are kept as can be, each as large as can be; the CPU's with the
    // scratch. exactly: by taking that much for a moment, else about. error(KVG_DEVICE)
    std::vector<size_t> most(bool exactly) const;
    // error(KVG_DEVICE) when there is no room for it: better now than in the middle of a text
    void reserve();
    // bytes held on each device, in the order of backends; the CPU's with the scratch
    std::vector<size_t> sizes() const;

    // A graph that attends to a span of each group, for its inputs to be set: one that is kept, or a new one. A mask takes n_tokens rows
    // of its span. segments: of states on devices; empty where there are none. drafts: of the draft head or the assistant alone. error(KVG_DEVICE)
    decode_graph & prepare(uint32_t n_tokens, uint32_t n_outputs, const std::vector<cell_span> & spans,
                           const state_segments & segments, bool drafts = false);
    // From the next graph on these take part, and no others. All or nothing. error(KVG_DEVICE)
    void adapt(std::vector<active_adapter> adapters);
    // Of each group, for the inputs of the graph that was prepared.
    std::vector<attended_cells> & attended() { return attended_; }
    // Whether cells whose K-shift is pending may wait, because attention rotates the queries for them. It can do so where all attention
    // is this library's own and K is quantized. Each rotation rounds K again: that costs a quantized K precision, but floats so little
    // that to rotate them once is cheaper.
    bool can_rotate_queries() const { return can_rotate_queries_; }
    // Which cells wait, and how queries are rotated for them. of: of a layer with K and V of its own; valid until the next call, and the
    // arrays must live until then. precondition: can_rotate_queries()
    void set_waiting(const std::function<attend_rotations(uint32_t layer)> & of);
    // Whether all attention is this library's own, which tells what tokens attend to.
    bool can_observe() const { return any_span_; }
    // From now on nothing was observed yet.
    void begin_observing();
    // The next computation's tokens from this one on are observed; peaks: only the highest that they give a cell. preconditions:
    // can_observe(), the graph was prepared
    void observe(uint32_t from, uint32_t n_tokens, bool peaks);
    // of a group
    const observed_attention & observed(size_t group) const { return observed_[group]; }
    // Which states the tokens of the next computation go through; the arrays must live until then.
    void set_runs(const std::vector<recur_run> & runs) { runs_ = runs; }
    // nullptr: all cells are read where they lie. Else it must be told what the next graph works on.
    class carrier * carrier() { return carrier_.get(); }
    // Those who take what graphs write; they must be told what the next one does.
    class taps & taps() { return taps_; }
    // The graph that was prepared. One without outputs may still be computed afterwards, until wait(). error(KVG_DEVICE)
    void compute();
    // error(KVG_DEVICE)
    void wait();
    // spent in graphs so far
    double seconds() const { return seconds_; }

    // Of the layers whose cells the device reads: "flash", "plain" or "attend"; "" when there are none.
    std::string attention_on(ggml_backend_dev_t device) const;
    // The names of what the largest graph wants there, and the CPU does.
    std::string refused_by(ggml_backend_dev_t device) const;

private:
    std::vector<size_t> with_workspace(std::vector<size_t> sizes) const;
    void choose_attentions(int32_t flash_attn, int max_threads);
    void make_recurs();
    std::vector<state_group> most_states(uint32_t n_tokens) const;
    decode_shape largest() const { return shape_of(n_ubatch_); }
    decode_shape largest_of_drafts() const;
    decode_shape shape_of(uint32_t n_tokens) const;
    [[noreturn]] void fail_without_memory() const;
    std::unique_ptr<decode_graph> make_graph(const decode_shape & shape) const;
    void make_graph_cache();
    size_t max_tensors() const;

    const model & model_;
    const kv_cache & cache_;
    const backends & backends_;
    uint32_t n_ubatch_;
    uint32_t n_outputs_;
    bool any_span_; // one graph does for every span, as all layers have attention_kind::attend
    bool can_rotate_queries_;
    std::vector<attended_cells> attended_; // of each group
    std::unique_ptr<attend_workspace> workspace_;
    std::deque<attend_op> ops_; // for attention_kind::attend
    std::vector<layer_attention> attentions_;
    std::vector<layer_attention> of_assistant_;
    std::vector<observed_attention> observed_; // of each group
    std::vector<recur_run> runs_;              // of the micro-batch
    recur_workspace recur_workspace_;
    std::deque<recur_op> recur_ops_;
    std::vector<recur_op *> recurs_; // of each layer, nullptr: it has no state, or a device has it
    std::vector<active_adapter> adapters_;
    uint32_t n_state_groups_ = 4; // that graphs have room for
    std::unique_ptr<graph_cache> graphs_;
    std::unique_ptr<class carrier> carrier_;
    class taps taps_;
    double seconds_ = 0.0;
};

} // namespace kvg
