#include "model/override.h"

#include <limits>

#include "error.h"

namespace kvg {

namespace {

bool is_integer(gguf_type type) {
    return type != GGUF_TYPE_FLOAT32 && type != GGUF_TYPE_FLOAT64 && type != GGUF_TYPE_BOOL && type != GGUF_TYPE_STRING &&
           type != GGUF_TYPE_ARRAY;
}

bool fits(gguf_type type, const key_override & wanted) {
    switch (wanted.value.index()) {
    case 0:
        return is_integer(type);
    case 1:
        return type == GGUF_TYPE_FLOAT32 || type == GGUF_TYPE_FLOAT64;
    case 2:
        return type == GGUF_TYPE_BOOL;
    default:
        return type == GGUF_TYPE_STRING;
    }
}

template <class T, class F> bool set_if_fits(gguf_context * meta, const char * key, int64_t value, F && set) {
    using limits = std::numeric_limits<T>;
    if (value < static_cast<int64_t>(limits::min()) ||
        (sizeof(T) < sizeof(int64_t) && value > static_cast<int64_t>(limits::max()))) {
        return false;
    }
    set(meta, key, static_cast<T>(value));
    return true;
}

// Of the type that it had; of 64 bits where the value doesn't fit into that.
void set_integer(gguf_context * meta, const char * key, gguf_type type, int64_t value) {
    bool done = false;
    switch (type) {
    case GGUF_TYPE_UINT8:
        done = set_if_fits<uint8_t>(meta, key, value, gguf_set_val_u8);
        break;
    case GGUF_TYPE_INT8:
        done = set_if_fits<int8_t>(meta, key, value, gguf_set_val_i8);
        break;
    case GGUF_TYPE_UINT16:
        done = set_if_fits<uint16_t>(meta, key, value, gguf_set_val_u16);
        break;
    case GGUF_TYPE_INT16:
        done = set_if_fits<int16_t>(meta, key, value, gguf_set_val_i16);
        break;
    case GGUF_TYPE_UINT32:
        done = set_if_fits<uint32_t>(meta, key, value, gguf_set_val_u32);
        break;
    case GGUF_TYPE_INT32:
        done = set_if_fits<int32_t>(meta, key, value, gguf_set_val_i32);
        break;
    case GGUF_TYPE_UINT64:
        done = set_if_fits<uint64_t>(meta, key, value, gguf_set_val_u64);
        break;
    default:
        break;
    }
    if (!done) {
        gguf_set_val_i64(meta, key, value);
    }
}

} // namespace

void apply_override(gguf_context * meta, const std::string & path, const key_override & wanted) {
    static const char * const names[] = {"int", "float", "bool", "str"};
    const char * key = wanted.key.c_str();
    const char * name = names[wanted.value.index()];
    if (wanted.key.empty() || wanted.key == "general.alignment" || wanted.key.rfind("split.", 0) == 0) {
        fail(KVG_INVALID_ARGUMENT, "%s: key '%s' says how the file is built, and can't be overridden", path.c_str(), key);
    }
    const int64_t id = gguf_find_key(meta, key);
    const gguf_type type = id < 0 ? GGUF_TYPE_UINT32 : gguf_get_kv_type(meta, id);
    if (id >= 0 && !fits(type, wanted)) {
        fail(KVG_INVALID_ARGUMENT, "%s: key '%s' is %s, and the override %s", path.c_str(), key,
             type == GGUF_TYPE_ARRAY ? "an array, which can't be overridden" : gguf_type_name(type), name);
    }
    if (const auto * integer = std::get_if<int64_t>(&wanted.value)) {
        set_integer(meta, key, type, *integer);
    } else if (const auto * number = std::get_if<double>(&wanted.value)) {
        if (type == GGUF_TYPE_FLOAT64) {
            gguf_set_val_f64(meta, key, *number);
        } else {
            gguf_set_val_f32(meta, key, static_cast<float>(*number));
        }
    } else if (const auto * flag = std::get_if<bool>(&wanted.value)) {
        gguf_set_val_bool(meta, key, *flag);
    } else {
        gguf_set_val_str(meta, key, std::get<std::string>(wanted.value).c_str());
    }
}

} // namespace kvg
