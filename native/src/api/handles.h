// The opaque handles of kvgraph.h, and what every call of it does: check, catch, set the last error.
#pragma once

#include <memory>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "error.h"
#include "kvgraph.h"
#include "model/gguf_file.h"
#include "model/weights.h"
#include "runtime/context.h"

struct kvg_gguf {
    std::shared_ptr<const kvg::gguf_file> file;
};

struct kvg_model {
    std::shared_ptr<const kvg::model> model;
    kvg_gguf gguf; // shares the model's file
    std::string device;
    std::string kept_on_cpu; // lines
};

struct kvg_adapter {
    std::shared_ptr<const kvg::adapter> adapter;
    kvg_gguf gguf; // shares the adapter's file
};

struct kvg_context {
    kvg_context(const kvg_model & model, const kvg_context_params & params)
        : owned(std::make_shared<kvg::context>(model.model, params)), context(*owned), gguf(model.gguf) {}
    std::shared_ptr<kvg::context> owned; // shared with what comes in
    kvg::context & context;
    kvg_gguf gguf; // shares the model's file
};

struct kvg_incoming {
    std::shared_ptr<kvg::context> context; // whose rows are written
    std::shared_ptr<kvg::incoming> cells;
};

struct kvg_tap {
    std::shared_ptr<kvg::context> context; // whose graphs write what is taken
    std::shared_ptr<kvg::tap> tap;
    std::optional<kvg::tapped> item; // the last that kvg_tap_next() told of
};

struct kvg_plan {
    std::vector<kvg::context_part> parts;
};

namespace kvg {

// Keeps the message for kvg_last_error(), and gives the status back.
kvg_status set_error(kvg_status status, const char * message) noexcept;

template <class F> kvg_status guarded(F && call) noexcept {
    try {
        call();
        return KVG_OK;
    } catch (const error & e) {
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
        fail(KVG_INVALID_ARGUMENT, "%s is NULL", name);
    }
    return *pointer;
}

// A struct from outside: not NULL, and of the size this library was compiled with.
template <class T> T & need_struct(T * pointer, const char * name) {
    T & value = need(pointer, name);
    if (value.struct_size != sizeof(T)) {
        fail(KVG_INVALID_ARGUMENT, "%s->struct_size is %zu, expected %zu: the caller was built for another version", name,
             value.struct_size, sizeof(T));
    }
    return value;
}

// Runs an operation on a context; a test build then checks what must always hold of the cells, all the more when it failed.
template <class F> kvg_status on_context(kvg_context * handle, F && operation) noexcept {
    const kvg_status status = guarded([&] {
        need(handle, "context").context.intake().sweep();
        handle->context.taps().sweep();
        operation(handle->context);
    });
#ifdef KVGRAPH_TEST_HOOKS
    const kvg_status checked = handle ? guarded([&] {
        for (const kv_group & group : handle->context.cache().groups()) {
            group.cells().check();
        }
    })
                                      : KVG_OK;
    return checked == KVG_OK ? status : checked;
#else
    return status;
#endif
}

} // namespace kvg
