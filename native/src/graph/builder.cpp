#include "graph/builder.h"

#include <algorithm>
#include <string_view>
#include <unordered_set>

#include "error.h"
#include "graph/expert_product.h"
#include "graph/product.h"
#include "graph/roped.h"
#include "graph/rounding.h"
#include "host_memory.h"

namespace kvg {

static constexpr size_t CHUNK_TENSORS = 512;

void builder::open(size_t n_bytes) {
    std::unique_ptr<uint8_t[]> arena(new uint8_t[n_bytes]);
    ggml_context_ptr ctx = new_ggml_context(n_bytes, arena.get());
    chunks_.push_back({std::move(arena), std::move(ctx), nullptr});
}

// Without this check an operation with too many tensors would fail only where it is the last one in its chunk, and then in ggml.
void builder::require_room_kept() const {
    if (chunks_.empty()) {
        return;
    }
    const size_t n = (ggml_used_mem(chunks_.back().ctx.get()) - n_used_) / ggml_tensor_overhead();
    if (n > MAX_OPERATION) {
        fail(KVG_INTERNAL, "an operation of the graph made %zu tensors, and has room for %zu", n, MAX_OPERATION);
    }
}

void builder::require_outputs_known() const {
    for (const ggml_tensor * t : folded_) {
        if ((t->flags & GGML_TENSOR_FLAG_OUTPUT) != 0) {
            fail(KVG_INTERNAL, "'%s' became an output of the graph after a product that computes it by itself",
                 ggml_get_name(t));
        }
    }
}

ggml_context * builder::ctx() {
    require_room_kept();
    const auto left = [](ggml_context * ctx) { return ggml_get_mem_size(ctx) - ggml_used_mem(ctx); };
    if (chunks_.empty() || left(chunks_.back().ctx.get()) < MAX_OPERATION * ggml_tensor_overhead()) {
        open(CHUNK_TENSORS * ggml_tensor_overhead());
    }
    n_used_ = ggml_used_mem(chunks_.back().ctx.get());
    return chunks_.back().ctx.get();
}

ggml_tensor * builder::input(const char * name, ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2) {
    ggml_tensor * t = ggml_set_name(ggml_new_tensor_3d(ctx(), type, ne0, ne1, ne2), name);
    ggml_set_input(t);
    return t;
}

ggml_tensor * called_as(ggml_tensor * product, const ggml_tensor * weight) {
    const std::string_view name = ggml_get_name(weight);
    const std::string_view end = ".weight";
    const bool has_end = name.size() > end.size() && name.substr(name.size() - end.size()) == end;
    const auto length = static_cast<int>(name.size() - (has_end ? end.size() : 0));
    return ggml_format_name(product, "%.*s", length, name.data());
}

ggml_tensor * builder::rounded_for(ggml_tensor * x, const row_form & form) {
    const auto [known, is_new] = rounded_.try_emplace({x, &form});
    if (is_new) {
        known->second = rounded(ctx(), x, form);
        if (known->second->src[0] != x) {
            folded_.push_back(x);
        }
    }
    return known->second;
}

void builder::together(ggml_tensor * x, std::initializer_list<ggml_tensor *> weights) {
    std::map<const row_form *, std::vector<ggml_tensor *>> alike;
    for (ggml_tensor * weight : weights) {
        if (const row_form * form = weight ? form_of(weight, x) : nullptr) {
            alike[form].push_back(weight);
        }
    }
    for (const auto & [form, some] : alike) {
        ggml_tensor * rows = rounded_for(x, *form);
        const std::vector<ggml_tensor *> made = multiply(ctx(), some, rows);
        called_as(made.front()->view_src ? made.front()->view_src : made.front(), some.front());
        for (size_t i = 0; i < some.size(); ++i) {
            products_[{x, some[i]}] = made[i];
        }
    }
}

ggml_tensor * builder::plain_product(ggml_tensor * x, ggml_tensor * weight) {
    const auto made = products_.find({x, weight});
    if (made != products_.end()) {
        return made->second;
    }
    const row_form * form = form_of(weight, x);
    if (!form) {
        return ggml_mul_mat(ctx(), weight, x);
    }
    ggml_tensor * rows = rounded_for(x, *form);
    return multiply(ctx(), {weight}, rows).front();
}

ggml_tensor * builder::adapted(ggml_tensor * y, ggml_tensor * x, const ggml_tensor * weight, ggml_tensor * ids) {
    const auto times = [&](ggml_tensor * narrow, ggml_tensor * in) {
        return ids ? ggml_mul_mat_id(ctx(), narrow, in, ids) : plain_product(in, narrow);
    };
    for (const active_adapter & active : adapters_) {
        if (const low_rank * pair = active.adapter->of_weight(weight)) {
            ggml_tensor * more = times(pair->b, times(pair->a, x));
            y = ggml_add(ctx(), y, ggml_scale(ctx(), more, active.scale * pair->scale));
        }
    }
    return y;
}

ggml_tensor * builder::linear(ggml_tensor * x, ggml_tensor * weight, ggml_tensor * scale, ggml_tensor * bias) {
    ggml_tensor * y = called_as(plain_product(x, weight), weight);
    y = scale ? ggml_mul(ctx(), y, scale) : y;
    y = adapted(y, x, weight);
    return bias ? ggml_add(ctx(), y, bias) : y;
}

ggml_tensor * builder::sum(ggml_tensor * made, ggml_tensor * x) {
    if (ggml_tensor * y = multiply_and_add(ctx(), made, x)) {
        folded_.push_back(made);
        return y;
    }
    return ggml_add(ctx(), made, x);
}

ggml_tensor * builder::order_of(ggml_tensor * experts, int64_t n_expert) {
    const auto [known, is_new] = orders_.try_emplace(experts);
    known->second = is_new ? expert_order(ctx(), experts, n_expert) : known->second;
    return known->second;
}

ggml_tensor * builder::rope_table_of(ggml_tensor * positions, ggml_tensor * freq_factors, const rope_params & params) {
    for (const known_table & known : rope_tables_) {
        if (known.positions == positions && known.freq_factors == freq_factors && *known.params == params) {
            return known.table;
        }
    }
    rope_tables_.push_back({positions, freq_factors, &params, rope_table(ctx(), positions, freq_factors, params)});
    return rope_tables_.back().table;
}

ggml_tensor * builder::plain_experts(ggml_tensor * x, ggml_tensor * weight, ggml_tensor * experts) {
    const row_form * form = form_of_experts(weight, x);
    if (!form) {
        return ggml_mul_mat_id(ctx(), weight, x, experts);
    }
    ggml_tensor * order = order_of(experts, weight->ne[2]);
    const auto [known, is_new] = rounded_.try_emplace({x, form});
    known->second = is_new ? rounded_in_order(ctx(), x, experts, order, *form) : known->second;
    return by_tokens(ctx(), multiply_in_order(ctx(), {weight}, known->second, order), experts, order);
}

bool builder::adapts(const ggml_tensor * weight) const {
    return std::any_of(adapters_.begin(), adapters_.end(),
                       [&](const active_adapter & active) { return active.adapter->of_weight(weight) != nullptr; });
}

ggml_tensor * builder::experts(ggml_tensor * x, ggml_tensor * weight, ggml_tensor * scale, ggml_tensor * experts) {
    ggml_tensor * y = called_as(plain_experts(x, weight, experts), weight);
    if (scale) {
        const int64_t n_expert = scale->ne[0];
        ggml_tensor * all = ggml_reshape_3d(ctx(), scale, 1, n_expert, 1);
        all = ggml_repeat_4d(ctx(), all, 1, n_expert, experts->ne[1], 1);
        y = ggml_mul(ctx(), y, ggml_get_rows(ctx(), all, experts));
    }
    return adapted(y, x, weight, experts);
}

ggml_tensor * builder::embeddings(ggml_tensor * weight, ggml_tensor * tokens) {
    ggml_tensor * y = ggml_get_rows(ctx(), weight, tokens);
    for (const active_adapter & active : adapters_) {
        if (const low_rank * pair = active.adapter->of_embedding()) {
            ggml_tensor * more = plain_product(ggml_get_rows(ctx(), pair->a, tokens), pair->b);
            y = ggml_add(ctx(), y, ggml_scale(ctx(), more, active.scale * pair->scale));
        }
    }
    return y;
}

void builder::wish(ggml_backend_dev_t device) {
    for (; first_unwished_ < chunks_.size(); ++first_unwished_) {
        chunk & c = chunks_[first_unwished_];
        ggml_context * ctx = c.ctx.get();
        ggml_tensor * t = c.last_wished ? ggml_get_next_tensor(ctx, c.last_wished) : ggml_get_first_tensor(ctx);
        for (; t; t = ggml_get_next_tensor(ctx, t)) {
            c.last_wished = t;
            const bool computes = t->op != GGML_OP_NONE && t->op != GGML_OP_RESHAPE && t->op != GGML_OP_VIEW &&
                                  t->op != GGML_OP_PERMUTE && t->op != GGML_OP_TRANSPOSE;
            if (computes) {
                wishes_.emplace_back(t, device);
            }
        }
        if (first_unwished_ + 1 == chunks_.size()) {
            return; // more may come
        }
    }
}

// Where a node of ours does what others were made for, these are in no graph: no device is asked for them, and they take no place in its
// tables.
void builder::forget_unused(ggml_cgraph * graph) {
    ggml_tensor ** nodes = ggml_graph_nodes(graph);
    const std::unordered_set<const ggml_tensor *> used(nodes, nodes + ggml_graph_n_nodes(graph));
    const auto is_unused = [&](const auto & wish) { return used.count(wish.first) == 0; };
    wishes_.erase(std::remove_if(wishes_.begin(), wishes_.end(), is_unused), wishes_.end());
}

// There are no more nodes than tensors that were made, and no more leafs: an operation takes at most one tensor from outside, a weight
// or rows of the cache.
ggml_cgraph * builder::finish() {
    require_room_kept();
    require_outputs_known();
    size_t n = 0;
    for (const chunk & c : chunks_) {
        for (ggml_tensor * t = ggml_get_first_tensor(c.ctx.get()); t; t = ggml_get_next_tensor(c.ctx.get(), t)) {
            ++n;
        }
    }
    open(ggml_graph_overhead_custom(n, false));
    ggml_cgraph * graph = ggml_new_graph_custom(chunks_.back().ctx.get(), n, false);
    for (ggml_tensor * t : roots_) {
        ggml_build_forward_expand(graph, t);
    }
    forget_unused(graph);
    set_order_of_products(graph);
    return graph;
}

} // namespace kvg
