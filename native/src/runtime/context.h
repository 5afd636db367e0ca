// A context: owns the parts that do its work, and gives access to them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backends.h"
#include "graph/decoder.h"
#include "kvgraph.h"
#include "memory/kv_cache.h"
#include "model/weights.h"
#include "runtime/draft_step.h"
#include "runtime/incoming.h"
#include "runtime/report.h"
#include "runtime/step.h"
#include "runtime/transfer.h"
#include "runtime/upkeep.h"

namespace kvg {

class context {
public:
    // Checks what the devices support and how much memory they have, and then allocates. If the model was opened only to measure it, the
    // cache gets no memory, and only parts() may be called. adapters: of this model, those that take part until adapt() is called.
    // error(KVG_INVALID_ARGUMENT), error(KVG_DEVICE), error(KVG_UNSUPPORTED)
    context(std::shared_ptr<const model> model, const kvg_context_params & params, std::vector<active_adapter> adapters = {});

    const kv_cache & cache() const { return *cache_; }
    kv_cache & cache() { return *cache_; }
    class step & step() { return *step_; }
    const class step & step() const { return *step_; }
    // error(KVG_UNSUPPORTED) for a model without a draft head or an assistant
    class draft_step & draft_step();
    class upkeep & upkeep() { return *upkeep_; }
    const class upkeep & upkeep() const { return *upkeep_; }
    class transfer & transfer() { return *transfer_; }
    class intake & intake() { return *intake_; }
    class taps & taps() { return decoder_->taps(); }
    // what the last decode's observed tokens attend to
    const observed_attention & observed(size_t group) const { return decoder_->observed(group); }
    // From the next decode on these take part, and no others; cells stay as they are. All or nothing.
    // error(KVG_INVALID_ARGUMENT) for an adapter of another model, one given twice, or a scale that is no number; error(KVG_DEVICE)
    void adapt(std::vector<active_adapter> adapters);
    // As kvg_classify has it. error(KVG_UNSUPPORTED), error(KVG_DEVICE)
    void classify(const float * states, uint32_t n, float * scores) const;
    // Every cell becomes empty, also reserved ones. Pending K-shifts and a requested defrag are dropped.
    void clear(bool data);
    // whether K of any layer can be rotated to another position, or no K has one (ALiBi, layers without attention)
    bool can_shift() const;
    // whether attention tells distances by the positions of cells (ALiBi)
    bool tells_distances() const { return model_->hparams().tells_distances(); }
    // whether K of a group was rotated with LongRoPE's factors for long contexts
    bool has_long_rope(size_t group) const;
    // seconds spent in decode graphs so far
    double graph_seconds() const { return decoder_->seconds(); }
    // error(KVG_UNSUPPORTED) where rows are read where they lie
    class trace & trace();
    // one for each device that holds weights, cells or graph memory; the CPU is last
    const std::vector<context_part> & parts();

private:
    void reserve_graphs(uint32_t n_ubatch);

    std::shared_ptr<const model> model_;
    std::unique_ptr<backends> backends_;
    std::unique_ptr<kv_cache> cache_;
    std::unique_ptr<decoder> decoder_;
    std::unique_ptr<class upkeep> upkeep_;
    std::unique_ptr<last_states> last_states_; // only where something drafts; so is draft_step_
    std::unique_ptr<class step> step_;
    std::unique_ptr<class draft_step> draft_step_;
    std::unique_ptr<class transfer> transfer_;
    std::unique_ptr<class intake> intake_;
    std::vector<context_part> parts_;
    std::vector<size_t> planned_bytes_; // of the graphs, on each device, when the model is only measured
};

} // namespace kvg
