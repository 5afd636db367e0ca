// A context: what it is made of, and its calls handed to those who do them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backends.h"
#include "graph/decoder.h"
#include "kvgraph.h"
#include "memory/kv_cache.h"
#include "model/weights.h"
#include "runtime/incoming.h"
#include "runtime/report.h"
#include "runtime/step.h"
#include "runtime/transfer.h"
#include "runtime/upkeep.h"

namespace kvg {

class context {
public:
    // Asks the devices and checks the room they have before it allocates. On a model that is only measured, the cache has no memory, and
    // nothing but parts() may be called. error(KVG_INVALID_ARGUMENT), error(KVG_DEVICE), error(KVG_UNSUPPORTED)
    context(std::shared_ptr<const model> model, const kvg_context_params & params);

    const kv_cache & cache() const { return *cache_; }
    kv_cache & cache() { return *cache_; }
    class step & step() { return *step_; }
    const class step & step() const { return *step_; }
    class upkeep & upkeep() { return *upkeep_; }
    class transfer & transfer() { return *transfer_; }
    class intake & intake() { return *intake_; }
    // Every cell becomes empty, reserved ones too, and what is pending is forgotten.
    void clear(bool data);
    // whether K of any layer can be rotated to another position
    bool can_shift() const;
    // spent in decode graphs so far
    double graph_seconds() const { return decoder_->seconds(); }
    // one for each device that has anything, the CPU last
    const std::vector<context_part> & parts();

private:
    void reserve_graphs(uint32_t n_ubatch);

    std::shared_ptr<const model> model_;
    std::unique_ptr<backends> backends_;
    std::unique_ptr<kv_cache> cache_;
    std::unique_ptr<decoder> decoder_;
    std::unique_ptr<class upkeep> upkeep_;
    std::unique_ptr<class step> step_;
    std::unique_ptr<class transfer> transfer_;
    std::unique_ptr<class intake> intake_;
    std::vector<context_part> parts_;
    std::vector<size_t> graph_bytes_; // estimated, when they were not reserved
};

} // namespace kvg
