// The C boundary: checks pointers and struct sizes, catches, sets the last error. No logic.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include <ggml.h>
#include <pthread.h>

#include "device.h"
#include "error.h"
#include "fault.h"
#include "kvgraph.h"
#include "log.h"
#include "model/gguf_file.h"
#include "model/vocab_check.h"
#include "model/weights.h"
#include "runtime/context.h"

struct kvg_gguf {
    std::shared_ptr<const kvg::gguf_file> file;
};

struct kvg_model {
    std::shared_ptr<const kvg::model> model;
    kvg_gguf gguf; // shares the model's file
    std::string device;
};

struct kvg_context {
    kvg_context(const kvg_model & model, const kvg_context_params & params) : context(model.model, params), gguf(model.gguf) {}
    kvg::context context;
    kvg_gguf gguf; // shares the model's file
};

struct kvg_plan {
    std::vector<kvg::context_part> parts;
};

namespace {

thread_local std::string last_error;

kvg_status set_error(kvg_status status, const char * message) noexcept {
    try {
        last_error = message;
    } catch (...) {
        last_error.clear();
    }
    return status;
}

// Where the calling thread's stack ends; 0 when the system doesn't tell.
uintptr_t lowest_of_stack() noexcept {
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0) {
        return 0;
    }
    void * lowest = nullptr;
    size_t size = 0;
    const bool known = pthread_attr_getstack(&attributes, &lowest, &size) == 0;
    pthread_attr_destroy(&attributes);
    return known ? reinterpret_cast<uintptr_t>(lowest) : 0;
}

template <class F> kvg_status guarded(F && call) noexcept {
    try {
        call();
        return KVG_OK;
    } catch (const kvg::error & e) {
        return set_error(e.status(), e.what());
    } catch (const std::bad_alloc &) {
        return set_error(KVG_DEVICE, "out of host memory");
    } catch (const std::system_error & e) {
        return set_error(KVG_DEVICE, e.what()); // Vulkan's exceptions
    } catch (const std::exception & e) {
        return set_error(KVG_INTERNAL, e.what());
    } catch (...) {
        return set_error(KVG_INTERNAL, "an exception of unknown type");
    }
}

template <class T> T & need(T * pointer, const char * name) {
    if (!pointer) {
        kvg::fail(KVG_INVALID_ARGUMENT, "%s is NULL", name);
    }
    return *pointer;
}

// A struct from outside: not NULL, and of the size this library was compiled with.
template <class T> T & need_struct(T * pointer, const char * name) {
    T & value = need(pointer, name);
    if (value.struct_size != sizeof(T)) {
        kvg::fail(KVG_INVALID_ARGUMENT, "%s->struct_size is %zu, expected %zu: the caller was built for another version", name,
                  value.struct_size, sizeof(T));
    }
    return value;
}

const kvg::cells & cells_of(const kvg_context * context) { return need(context, "context").context.cache().cells(); }

// Runs an operation on the cells; a test build then checks what must always hold, all the more when the operation failed.
template <class F> kvg_status on_cells(kvg_context * context, F && operation) noexcept {
    const kvg_status status = guarded([&] { operation(need(context, "context").context.cache().cells()); });
#ifdef KVGRAPH_TEST_HOOKS
    const kvg_status checked = context ? guarded([&] { cells_of(context).check(); }) : KVG_OK;
    return checked == KVG_OK ? status : checked;
#else
    return status;
#endif
}

void fill_info(kvg_model_info & out, const kvg::hparams & h, const kvg::tensor_totals & totals) {
    out.arch = h.arch.c_str();
    out.n_layer = h.n_layer;
    out.n_embd = h.n_embd;
    out.n_head = h.n_head;
    out.n_head_kv = h.n_head_kv;
    out.head_dim = h.head_dim;
    out.n_vocab = h.n_vocab;
    out.n_ctx_train = h.n_ctx_train;
    out.n_params = totals.n_params;
    out.weight_bytes = totals.bytes;
}

void fill_stats(kvg_update_stats & out, kvg_update_stats stats) {
    stats.struct_size = sizeof(stats);
    out = stats;
}

} // namespace

uint64_t kvg_stack_left(void) {
    thread_local const uintptr_t lowest = lowest_of_stack();
    const char here = 0;
    const auto address = reinterpret_cast<uintptr_t>(&here);
    return lowest != 0 && address > lowest ? address - lowest : 0;
}

const char * kvg_last_error(void) { return last_error.c_str(); }

const char * kvg_version(void) { return KVG_VERSION; }
const char * kvg_ggml_version_built(void) { return KVG_GGML_VERSION_BUILT; }
const char * kvg_ggml_version_running(void) { return ggml_version(); }

void kvg_log_set(kvg_log_callback callback, void * user_data) { kvg::log_set(callback, user_data); }

int32_t kvg_device_count(void) { return kvg::device_count(); }

kvg_status kvg_device_get(int32_t index, kvg_device_info * out) {
    return guarded([&] { kvg::device_info(index, need_struct(out, "out")); });
}

kvg_status kvg_gguf_open(const char * path, kvg_gguf ** out) {
    return guarded([&] {
        need(out, "out") = nullptr;
        *out = std::make_unique<kvg_gguf>(kvg_gguf{std::make_shared<kvg::gguf_file>(&need(path, "path"))}).release();
    });
}

void kvg_gguf_free(kvg_gguf * gguf) { std::unique_ptr<kvg_gguf>{gguf}.reset(); }

int32_t kvg_gguf_fd(const kvg_gguf * gguf) { return gguf ? gguf->file->file().fd() : -1; }
uint64_t kvg_gguf_n_kv(const kvg_gguf * gguf) { return gguf ? gguf->file->n_kv() : 0; }
uint64_t kvg_gguf_n_tensors(const kvg_gguf * gguf) { return gguf ? gguf->file->tensors().size() : 0; }

static int64_t kv_index(const kvg_gguf & gguf, uint64_t index) {
    if (index >= gguf.file->n_kv()) {
        kvg::fail(KVG_INVALID_ARGUMENT, "no key has index %llu", (unsigned long long) index);
    }
    return static_cast<int64_t>(index);
}

kvg_status kvg_gguf_get_kv(const kvg_gguf * gguf, uint64_t index, kvg_gguf_kv * out) {
    return guarded([&] {
        kvg_gguf_kv & kv = need_struct(out, "out");
        const int64_t id = kv_index(need(gguf, "gguf"), index);
        const gguf_context * meta = gguf->file->meta();
        kv.key = gguf_get_key(meta, id);
        const gguf_type type = gguf_get_kv_type(meta, id);
        kv.is_array = type == GGUF_TYPE_ARRAY;
        kv.type = kv.is_array ? gguf_get_arr_type(meta, id) : type;
        kv.n = kv.is_array ? gguf_get_arr_n(meta, id) : 1;
        kv.data = kv.type == GGUF_TYPE_STRING ? nullptr
                  : kv.is_array               ? gguf_get_arr_data(meta, id)
                                              : gguf_get_val_data(meta, id);
    });
}

kvg_status kvg_gguf_get_string(const kvg_gguf * gguf, uint64_t index, uint64_t item, const char ** data, uint64_t * length) {
    return guarded([&] {
        const int64_t id = kv_index(need(gguf, "gguf"), index);
        const gguf_context * meta = gguf->file->meta();
        const bool is_array = gguf_get_kv_type(meta, id) == GGUF_TYPE_ARRAY;
        const gguf_type type = is_array ? gguf_get_arr_type(meta, id) : gguf_get_kv_type(meta, id);
        if (type != GGUF_TYPE_STRING || item >= (is_array ? gguf_get_arr_n(meta, id) : 1)) {
            kvg::fail(KVG_INVALID_ARGUMENT, "key %llu has no string %llu", (unsigned long long) index,
                      (unsigned long long) item);
        }
        need(data, "data") = is_array ? gguf_get_arr_str(meta, id, item) : gguf_get_val_str(meta, id);
        need(length, "length") = strlen(*data);
    });
}

kvg_status kvg_gguf_get_tensor(const kvg_gguf * gguf, uint64_t index, kvg_gguf_tensor * out) {
    return guarded([&] {
        kvg_gguf_tensor & tensor = need_struct(out, "out");
        const auto & tensors = need(gguf, "gguf").file->tensors();
        if (index >= tensors.size()) {
            kvg::fail(KVG_INVALID_ARGUMENT, "no tensor has index %llu", (unsigned long long) index);
        }
        const kvg::gguf_tensor & t = tensors[index];
        tensor.name = t.name.c_str();
        tensor.type = ggml_type_name(t.type);
        memcpy(tensor.ne, t.ne, sizeof(tensor.ne));
        tensor.offset = t.offset;
        tensor.size = t.size;
        tensor.data = gguf->file->file().data() + t.offset;
    });
}

kvg_status kvg_gguf_check_vocab(const kvg_gguf * gguf) {
    return guarded([&] { kvg::check_vocab(*need(gguf, "gguf").file); });
}

static std::shared_ptr<const kvg::model> load_model(const char * path, const kvg_model_params * params, kvg::loading how) {
    const kvg_model_params & p = need_struct(params, "params");
    kvg::placement_request request = {&need(p.devices, "params->devices"), p.n_gpu_layers, {}};
    if (p.n_split < 0) {
        kvg::fail(KVG_INVALID_ARGUMENT, "n_split is %lld, expected the number of shares", static_cast<long long>(p.n_split));
    }
    if (p.n_split > 0) {
        request.split.assign(&need(p.tensor_split, "params->tensor_split"), p.tensor_split + p.n_split);
    }
    return std::make_shared<const kvg::model>(&need(path, "path"), request, how);
}

kvg_status kvg_rpc_add_server(const char * endpoint) {
    return guarded([&] { kvg::add_rpc_server(&need(endpoint, "endpoint")); });
}

kvg_status kvg_model_load(const char * path, const kvg_model_params * params, kvg_model ** out) {
    return guarded([&] {
        need(out, "out") = nullptr;
        const auto model = load_model(path, params, kvg::loading::read);
        const std::shared_ptr<const kvg::gguf_file> file(model, &model->file());
        *out = std::make_unique<kvg_model>(kvg_model{model, {file}, model->placement().name()}).release();
    });
}

void kvg_model_free(kvg_model * model) { std::unique_ptr<kvg_model>{model}.reset(); }

kvg_status kvg_model_get_info(const kvg_model * model, kvg_model_info * out) {
    return guarded([&] {
        kvg_model_info & info = need_struct(out, "out");
        const kvg::model & m = *need(model, "model").model;
        fill_info(info, m.hparams(), m.totals());
        info.device = model->device.c_str();
    });
}

kvg_status kvg_model_layer_device(const kvg_model * model, int64_t layer, const char ** out) {
    return guarded([&] {
        const kvg::placement & placement = need(model, "model").model->placement();
        if (layer < 0 || layer > placement.n_layer()) {
            kvg::fail(KVG_INVALID_ARGUMENT, "layer is %lld, expected 0 to %u", static_cast<long long>(layer),
                      placement.n_layer());
        }
        need(out, "out") = ggml_backend_dev_name(placement.layer(static_cast<uint32_t>(layer)));
    });
}

const kvg_gguf * kvg_model_gguf(const kvg_model * model) { return model ? &model->gguf : nullptr; }

kvg_status kvg_gguf_check_model(const kvg_gguf * gguf, kvg_model_info * out) {
    return guarded([&] {
        kvg_model_info & info = need_struct(out, "out");
        const kvg::gguf_file & file = *need(gguf, "gguf").file;
        const kvg::hparams h = kvg::read_hparams(file);
        fill_info(info, h, kvg::check_tensors(file, h));
        info.arch = kvg::find_arch(h.arch).name; // outlives this call, as h doesn't
        info.device = "";
    });
}

kvg_status kvg_context_new(kvg_model * model, const kvg_context_params * params, kvg_context ** out) {
    return guarded([&] {
        need(out, "out") = nullptr;
        const kvg_context_params & p = need_struct(params, "params");
        *out = std::make_unique<kvg_context>(need(model, "model"), p).release();
    });
}

void kvg_context_free(kvg_context * context) { std::unique_ptr<kvg_context>{context}.reset(); }

const kvg_gguf * kvg_context_gguf(const kvg_context * context) { return context ? &context->gguf : nullptr; }

static void fill_part(const std::vector<kvg::context_part> & parts, int64_t index, kvg_context_part & out) {
    if (index < 0 || static_cast<size_t>(index) >= parts.size()) {
        kvg::fail(KVG_INVALID_ARGUMENT, "no part has index %lld: there are %zu", static_cast<long long>(index), parts.size());
    }
    const kvg::context_part & part = parts[static_cast<size_t>(index)];
    out = {sizeof(out),          ggml_backend_dev_name(part.device),
           part.n_layer,         part.n_cache,
           part.weight_bytes,    part.cache_bytes,
           part.compute_bytes,   part.attention.c_str(),
           part.shift_on_device, part.fallbacks.c_str()};
}

int64_t kvg_context_n_parts(kvg_context * context) {
    return context ? static_cast<int64_t>(context->context.parts().size()) : 0;
}

kvg_status kvg_context_get_part(kvg_context * context, int64_t index, kvg_context_part * out) {
    return guarded([&] { fill_part(need(context, "context").context.parts(), index, need_struct(out, "out")); });
}

kvg_status kvg_plan_new(const char * path, const kvg_model_params * model, const kvg_context_params * context,
                        kvg_plan ** out) {
    return guarded([&] {
        need(out, "out") = nullptr;
        const kvg_context_params & p = need_struct(context, "context");
        kvg::context measured(load_model(path, model, kvg::loading::measure), p);
        *out = std::make_unique<kvg_plan>(kvg_plan{measured.parts()}).release();
    });
}

void kvg_plan_free(kvg_plan * plan) { std::unique_ptr<kvg_plan>{plan}.reset(); }

int64_t kvg_plan_n_parts(const kvg_plan * plan) { return plan ? static_cast<int64_t>(plan->parts.size()) : 0; }

kvg_status kvg_plan_get_part(const kvg_plan * plan, int64_t index, kvg_context_part * out) {
    return guarded([&] { fill_part(need(plan, "plan").parts, index, need_struct(out, "out")); });
}

double kvg_context_graph_seconds(const kvg_context * context) { return context ? context->context.graph_seconds() : 0.0; }

// Calls decode(output), which returns the rows that it wrote.
template <class F> static kvg_status with_output(kvg_context * context, kvg_output * output, F && decode) {
    return on_cells(context, [&](kvg::cells &) {
        if (!output) {
            decode(nullptr);
            return;
        }
        kvg_output & out = need_struct(output, "output");
        out.n_written = -1;
        out.n_written = decode(&out);
    });
}

kvg_status kvg_decode(kvg_context * context, const kvg_batch * batch, kvg_output * output) {
    return with_output(context, output,
                       [&](const kvg_output * out) { return context->context.decode(need_struct(batch, "batch"), out); });
}

kvg_status kvg_append(kvg_context * context, int64_t seq, int64_t token, kvg_output * output) {
    return with_output(context, output, [&](const kvg_output * out) { return context->context.append(seq, token, out); });
}

kvg_status kvg_undo_decode(kvg_context * context) {
    return on_cells(context, [&](kvg::cells &) { context->context.undo_decode(); });
}

kvg_status kvg_kv_get_info(const kvg_context * context, kvg_kv_info * out) {
    return guarded([&] {
        kvg_kv_info & info = need_struct(out, "out");
        const kvg::context & c = need(context, "context").context;
        const kvg::kv_cache & cache = c.cache();
        info.n_cells = cache.cells().size();
        info.n_used = cache.cells().n_used();
        info.n_kv = cache.cells().n_kv();
        info.n_seq_max = cache.cells().n_seq_max();
        info.n_layer = cache.n_layer();
        info.n_head_kv = cache.n_head_kv();
        info.head_dim_k = cache.head_dim();
        info.head_dim_v = cache.head_dim();
        info.n_attended = c.n_attended();
        info.bytes = static_cast<int64_t>(cache.bytes());
        info.cell_bytes = static_cast<int64_t>(cache.cell_bytes());
        info.type_k = cache.type_k(); // a kvg_type has ggml's number
        info.type_v = cache.type_v();
        info.hadamard_k = cache.hadamard_k(0) != nullptr;
        info.hadamard_v = cache.hadamard_v(0) != nullptr;
        info.can_shift = c.can_shift();
    });
}

kvg_status kvg_kv_seq_rm(kvg_context * context, int64_t seq, int64_t p0, int64_t p1) {
    return on_cells(context, [&](kvg::cells & cells) { cells.seq_rm(seq, p0, p1); });
}

kvg_status kvg_kv_seq_cp(kvg_context * context, int64_t src, int64_t dst, int64_t p0, int64_t p1) {
    return on_cells(context, [&](kvg::cells & cells) { cells.seq_cp(src, dst, p0, p1); });
}

kvg_status kvg_kv_seq_keep(kvg_context * context, int64_t seq) {
    return on_cells(context, [&](kvg::cells & cells) { cells.seq_keep(seq); });
}

kvg_status kvg_kv_seq_add(kvg_context * context, int64_t seq, int64_t p0, int64_t p1, int64_t delta) {
    return on_cells(context, [&](kvg::cells &) { context->context.seq_add(seq, p0, p1, delta); });
}

kvg_status kvg_kv_seq_div(kvg_context * context, int64_t seq, int64_t p0, int64_t p1, int64_t d) {
    return on_cells(context, [&](kvg::cells &) { context->context.seq_div(seq, p0, p1, d); });
}

kvg_status kvg_kv_seq_pos_min(const kvg_context * context, int64_t seq, int64_t * out) {
    return guarded([&] { need(out, "out") = cells_of(context).seq_pos_min(seq); });
}

kvg_status kvg_kv_seq_pos_max(const kvg_context * context, int64_t seq, int64_t * out) {
    return guarded([&] { need(out, "out") = cells_of(context).seq_pos_max(seq); });
}

kvg_status kvg_kv_seq_bounds(const kvg_context * context, int32_t * pos_min, int32_t * pos_max, int32_t * n_cells) {
    return guarded([&] {
        const kvg::cells & cells = cells_of(context);
        need(pos_min, "pos_min"), need(pos_max, "pos_max"), need(n_cells, "n_cells");
        for (uint32_t s = 0; s < cells.n_seq_max(); ++s) {
            pos_min[s] = cells.seq_pos_min(s);
            pos_max[s] = cells.seq_pos_max(s);
            n_cells[s] = static_cast<int32_t>(cells.extent(s).n);
        }
    });
}

kvg_status kvg_kv_seq_count(const kvg_context * context, int64_t seq, int64_t p0, int64_t p1, int64_t * n_cells,
                            int64_t * n_shared) {
    return guarded([&] {
        const kvg::seq_count count = cells_of(context).count(seq, p0, p1);
        need(n_cells, "n_cells") = count.n;
        need(n_shared, "n_shared") = count.n_shared;
    });
}

kvg_status kvg_kv_hold(kvg_context * context, int64_t seq, int64_t p0, int64_t p1, kvg_hold * out) {
    return on_cells(context, [&](kvg::cells & cells) {
        kvg_hold & hold = need_struct(out, "out");
        const kvg::hold_range range = cells.hold(seq, p0, p1);
        hold = {sizeof(hold), range.id, range.p0, range.p1};
    });
}

kvg_status kvg_kv_attach(kvg_context * context, int64_t hold, int64_t seq) {
    return on_cells(context, [&](kvg::cells & cells) { cells.attach(hold, seq); });
}

kvg_status kvg_kv_release(kvg_context * context, int64_t hold) {
    return on_cells(context, [&](kvg::cells & cells) { cells.release(hold); });
}

kvg_status kvg_kv_clear(kvg_context * context, int32_t data) {
    return on_cells(context, [&](kvg::cells &) { context->context.clear(data != 0); });
}

kvg_status kvg_kv_defrag(kvg_context * context, int32_t policy) {
    return guarded([&] { need(context, "context").context.request_defrag(policy); });
}

kvg_status kvg_kv_update(kvg_context * context, kvg_update_stats * out) {
    return on_cells(context, [&](kvg::cells &) {
        kvg_update_stats * stats = out ? &need_struct(out, "out") : nullptr;
        const kvg_update_stats done = context->context.update();
        if (stats) {
            fill_stats(*stats, done);
        }
    });
}

kvg_status kvg_kv_take_stats(kvg_context * context, kvg_update_stats * out) {
    return guarded([&] { fill_stats(need_struct(out, "out"), need(context, "context").context.take_stats()); });
}

kvg_status kvg_kv_cells(const kvg_context * context, int32_t * pos, uint64_t * seq, int32_t * shift, uint8_t * dither,
                        uint32_t * n_holds) {
    return guarded([&] {
        const kvg::cells & cells = cells_of(context);
        const auto copy = [&](auto * out, auto value) {
            for (uint32_t i = 0; out && i < cells.size(); ++i) {
                out[i] = value(i);
            }
        };
        copy(pos, [&](uint32_t i) { return cells.pos(i); });
        copy(shift, [&](uint32_t i) { return cells.shift(i); });
        copy(dither, [&](uint32_t i) { return cells.dither(i); });
        copy(n_holds, [&](uint32_t i) { return cells.n_holds(i); });
        if (seq) {
            std::copy_n(cells.words(0), size_t{cells.size()} * cells.n_words(), seq);
        }
    });
}

kvg_status kvg_kv_read(kvg_context * context, int64_t layer, int32_t v, float * out, uint64_t n_floats) {
    return on_cells(context, [&](kvg::cells &) { context->context.read(layer, v != 0, out, n_floats); });
}

kvg_status kvg_kv_read_rows(kvg_context * context, const int32_t * cells, int64_t n_cells, uint8_t * out, uint64_t n_bytes,
                            uint8_t * dither) {
    return on_cells(context, [&](kvg::cells &) {
        if (n_cells < 0) {
            kvg::fail(KVG_INVALID_ARGUMENT, "n_cells is %lld", static_cast<long long>(n_cells));
        }
        need(cells, "cells"), need(out, "out"), need(dither, "dither");
        context->context.read_rows(cells, static_cast<uint64_t>(n_cells), out, n_bytes, dither);
    });
}

kvg_status kvg_kv_replace(kvg_context * context, int64_t seq, const kvg_kv_rows * rows) {
    return on_cells(context, [&](kvg::cells &) {
        const kvg_kv_rows & in = need_struct(rows, "rows");
        need(in.pos, "rows->pos"), need(in.seq, "rows->seq"), need(in.dither, "rows->dither"), need(in.data, "rows->data");
        context->context.replace(seq, in);
    });
}

kvg_status kvg_test_fault(const char * site, int64_t countdown) {
    return guarded([&] {
#ifdef KVGRAPH_TEST_HOOKS
        kvg::fault_arm(&need(site, "site"), countdown);
#else
        need(site, "site");
        kvg::fail(KVG_UNSUPPORTED, "fault %lld: this library was built without KVGRAPH_TEST_HOOKS",
                  static_cast<long long>(countdown));
#endif
    });
}
