// Files: directory, metadata, and what would run them.
#include <cstring>

#include "api/handles.h"
#include "api/model.h"
#include "model/arch.h"
#include "model/vocab_check.h"

using namespace kvg;

kvg_status kvg_gguf_open(const char * path, const kvg_override * overrides, int64_t n_overrides, kvg_gguf ** out) {
    return guarded([&] {
        need(out, "out") = nullptr;
        const std::vector<key_override> wanted = overrides_of(overrides, n_overrides);
        const auto file = std::make_shared<gguf_file>(&need(path, "path"), parts::all, wanted, mapping::directory);
        *out = std::make_unique<kvg_gguf>(kvg_gguf{file}).release();
    });
}

void kvg_gguf_free(kvg_gguf * gguf) { std::unique_ptr<kvg_gguf>{gguf}.reset(); }

int32_t kvg_gguf_fd(const kvg_gguf * gguf, uint64_t part) {
    return gguf && part < gguf->file->n_parts() ? gguf->file->part(static_cast<uint32_t>(part)).file().fd() : -1;
}

uint64_t kvg_gguf_n_parts(const kvg_gguf * gguf) { return gguf ? gguf->file->n_parts() : 0; }

kvg_status kvg_gguf_get_part(const kvg_gguf * gguf, uint64_t index, const char ** path, uint64_t * size) {
    return guarded([&] {
        const gguf_file & file = *need(gguf, "gguf").file;
        if (index >= file.n_parts()) {
            fail(KVG_INVALID_ARGUMENT, "no part has index %llu", (unsigned long long) index);
        }
        const gguf_file & part = file.part(static_cast<uint32_t>(index));
        need(path, "path") = part.path().c_str();
        need(size, "size") = part.file().size();
    });
}

uint64_t kvg_gguf_n_kv(const kvg_gguf * gguf) { return gguf ? gguf->file->n_kv() : 0; }
uint64_t kvg_gguf_n_tensors(const kvg_gguf * gguf) { return gguf ? gguf->file->tensors().size() : 0; }

static int64_t kv_index(const kvg_gguf & gguf, uint64_t index) {
    if (index >= gguf.file->n_kv()) {
        fail(KVG_INVALID_ARGUMENT, "no key has index %llu", (unsigned long long) index);
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

// The strings of a value; of a scalar, one.
class strings {
public:
    strings(const kvg_gguf & gguf, uint64_t index)
        : meta_(gguf.file->meta()), id_(kv_index(gguf, index)), is_array_(gguf_get_kv_type(meta_, id_) == GGUF_TYPE_ARRAY) {
        const gguf_type type = is_array_ ? gguf_get_arr_type(meta_, id_) : gguf_get_kv_type(meta_, id_);
        n_ = type != GGUF_TYPE_STRING ? 0 : is_array_ ? gguf_get_arr_n(meta_, id_) : 1;
    }

    uint64_t n() const { return n_; }
    const char * at(uint64_t item) const {
        return is_array_ ? gguf_get_arr_str(meta_, id_, item) : gguf_get_val_str(meta_, id_);
    }

private:
    const gguf_context * meta_;
    int64_t id_;
    bool is_array_;
    uint64_t n_;
};

kvg_status kvg_gguf_get_string(const kvg_gguf * gguf, uint64_t index, uint64_t item, const char ** data, uint64_t * length) {
    return guarded([&] {
        const strings all(need(gguf, "gguf"), index);
        if (item >= all.n()) {
            fail(KVG_INVALID_ARGUMENT, "key %llu has no string %llu", (unsigned long long) index, (unsigned long long) item);
        }
        need(data, "data") = all.at(item);
        need(length, "length") = strlen(*data);
    });
}

kvg_status kvg_gguf_copy_strings(const kvg_gguf * gguf, uint64_t index, char * data, uint64_t room, uint64_t * n_bytes) {
    return guarded([&] {
        const strings all(need(gguf, "gguf"), index);
        uint64_t size = 0;
        for (uint64_t i = 0; i < all.n(); ++i) {
            size += strlen(all.at(i)) + 1;
        }
        need(n_bytes, "n_bytes") = size;
        if (size == 0 || size > room) {
            return;
        }
        char * end = &need(data, "data");
        for (uint64_t i = 0; i < all.n(); ++i) {
            end = stpcpy(end, all.at(i)) + 1;
        }
    });
}

kvg_status kvg_gguf_get_tensor(const kvg_gguf * gguf, uint64_t index, kvg_gguf_tensor * out) {
    return guarded([&] {
        kvg_gguf_tensor & tensor = need_struct(out, "out");
        const auto & tensors = need(gguf, "gguf").file->tensors();
        if (index >= tensors.size()) {
            fail(KVG_INVALID_ARGUMENT, "no tensor has index %llu", (unsigned long long) index);
        }
        const gguf_tensor & t = tensors[index];
        tensor.name = t.name.c_str();
        tensor.type = ggml_type_name(t.type);
        memcpy(tensor.ne, t.ne, sizeof(tensor.ne));
        tensor.offset = t.offset;
        tensor.size = t.size;
        tensor.part = static_cast<int32_t>(t.part);
        tensor.data = t.data();
    });
}

kvg_status kvg_gguf_check_vocab(const kvg_gguf * gguf) {
    return guarded([&] { check_vocab(*need(gguf, "gguf").file); });
}

kvg_status kvg_gguf_check_model(const kvg_gguf * gguf, kvg_model_info * out) {
    return guarded([&] {
        kvg_model_info & info = need_struct(out, "out");
        const gguf_file & file = *need(gguf, "gguf").file;
        const hparams h = read_hparams(file);
        fill_info(info, h, check_tensors(file, h));
        info.arch = find_arch(h.arch).name; // outlives this call, as h doesn't
        info.device = "";
    });
}

kvg_status kvg_gguf_get_layer(const kvg_gguf * gguf, int64_t layer, kvg_layer_info * out) {
    return guarded([&] { fill_layer(need_struct(out, "out"), read_hparams(*need(gguf, "gguf").file), layer); });
}
