#include "model/gguf_scan.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <string_view>

#include <ggml.h>
#include <gguf.h>

#include "error.h"
#include "model/file_kind.h"

namespace kvg {

namespace {

// Many times what the largest models have. Of a directory's bytes, ggml and libllama make up to twenty times as many in memory, and
// they look for keys and tensors one after the other.
constexpr uint64_t MAX_DIRECTORY = uint64_t{128} << 20;
constexpr uint64_t MAX_KEYS = 1 << 16;
constexpr uint64_t MAX_TENSORS = 1 << 16;
constexpr uint64_t MAX_KEY_LENGTH = (1 << 16) - 1; // GGUF's own limit

// 0: no type of fixed size
uint64_t value_size(uint32_t type) {
    switch (type) {
    case GGUF_TYPE_UINT8:
    case GGUF_TYPE_INT8:
    case GGUF_TYPE_BOOL:
        return 1;
    case GGUF_TYPE_UINT16:
    case GGUF_TYPE_INT16:
        return 2;
    case GGUF_TYPE_UINT32:
    case GGUF_TYPE_INT32:
    case GGUF_TYPE_FLOAT32:
        return 4;
    case GGUF_TYPE_UINT64:
    case GGUF_TYPE_INT64:
    case GGUF_TYPE_FLOAT64:
        return 8;
    default:
        return 0;
    }
}

struct more_needed {};

class scanner {
public:
    scanner(const std::string & path, const uint8_t * data, uint64_t n, uint64_t size)
        : path_(path), data_(data), end_(std::min(n, MAX_DIRECTORY)), goes_on_(n < std::min(size, MAX_DIRECTORY)),
          cut_(size > MAX_DIRECTORY) {}

    void header() {
        what_ = "the header";
        if (end_ < 4 || memcmp(take(1, 4), "GGUF", 4) != 0) {
            const std::string kind = tell_file_kind(data_, end_);
            fail(KVG_MODEL_LOAD, "%s is not a GGUF file: it %s", path_.c_str(),
                 kind.empty() ? "doesn't begin with 'GGUF'" : kind.c_str());
        }
        const auto version = number<uint32_t>();
        if (version != 2 && version != 3) {
            fail(KVG_MODEL_LOAD, "%s: GGUF version %u, expected 2 or 3 of a little-endian file; convert the model again",
                 path_.c_str(), version);
        }
        n_tensors_ = count("tensors", MAX_TENSORS);
        n_keys_ = count("keys", MAX_KEYS);
    }

    void keys() {
        std::set<std::string_view> seen;
        for (uint64_t i = 0; i < n_keys_; ++i) {
            name("key", i, MAX_KEY_LENGTH, seen);
            const auto type = number<uint32_t>();
            if (type == GGUF_TYPE_ARRAY) {
                const auto item_type = number<uint32_t>();
                values(item_type, number<uint64_t>());
            } else {
                values(type, 1);
            }
        }
    }

    void tensors() {
        std::set<std::string_view> seen;
        for (uint64_t i = 0; i < n_tensors_; ++i) {
            name("tensor", i, GGML_MAX_NAME - 1, seen);
            const auto n_dims = number<uint32_t>();
            if (n_dims > GGML_MAX_DIMS) {
                fail(KVG_MODEL_LOAD, "%s: %s has %u dimensions, expected at most %d", path_.c_str(), what_.c_str(), n_dims,
                     GGML_MAX_DIMS);
            }
            take(n_dims, sizeof(int64_t));
            take(1, sizeof(uint32_t) + sizeof(uint64_t)); // type and offset
        }
    }

private:
    // The next n items of `size` bytes each.
    const uint8_t * take(uint64_t n, uint64_t size) {
        if (n > (end_ - at_) / size) {
            if (goes_on_) {
                throw more_needed{};
            }
            if (cut_) {
                fail(KVG_MODEL_LOAD, "%s: keys and tensor list are over %llu MiB, more than any model has", path_.c_str(),
                     (unsigned long long) (MAX_DIRECTORY >> 20));
            }
            fail(KVG_MODEL_LOAD,
                 "%s ends in %s, which should have %llu x %llu bytes more: it is truncated or damaged; copy or download it "
                 "again",
                 path_.c_str(), what_.c_str(), (unsigned long long) n, (unsigned long long) size);
        }
        const uint8_t * taken = data_ + at_;
        at_ += n * size;
        return taken;
    }

    template <class T> T number() {
        T value;
        memcpy(&value, take(1, sizeof(T)), sizeof(T));
        return value;
    }

    uint64_t count(const char * of, uint64_t most) {
        const auto n = number<uint64_t>();
        if (n > most) {
            fail(KVG_MODEL_LOAD, "%s: %llu %s, expected at most %llu", path_.c_str(), (unsigned long long) n, of,
                 (unsigned long long) most);
        }
        return n;
    }

    std::string_view text() {
        const auto length = number<uint64_t>();
        const auto * begin = reinterpret_cast<const char *>(take(length, 1));
        if (length > 0 && memchr(begin, '\0', length)) {
            fail(KVG_MODEL_LOAD, "%s: NUL in %s", path_.c_str(), what_.c_str());
        }
        return {begin, length};
    }

    // From here on messages say "tensor 'output.weight'".
    void name(const char * of, uint64_t index, uint64_t most, std::set<std::string_view> & seen) {
        what_ = strformat("the name of %s %llu", of, (unsigned long long) index);
        const std::string_view found = text();
        if (found.empty() || found.size() > most) {
            fail(KVG_MODEL_LOAD, "%s: %s has %zu bytes, expected 1 to %llu", path_.c_str(), what_.c_str(), found.size(),
                 (unsigned long long) most);
        }
        what_ = strformat("%s '%.*s'", of, static_cast<int>(std::min<size_t>(found.size(), 200)), found.data());
        if (!seen.insert(found).second) {
            fail(KVG_MODEL_LOAD, "%s: %s is there twice", path_.c_str(), what_.c_str());
        }
    }

    void values(uint32_t type, uint64_t n) {
        if (type == GGUF_TYPE_STRING) {
            for (uint64_t i = 0; i < n; ++i) {
                text();
            }
            return;
        }
        const uint64_t size = value_size(type);
        if (size == 0) {
            fail(KVG_MODEL_LOAD, "%s: %s has a value of type %u, which GGUF doesn't have there", path_.c_str(), what_.c_str(),
                 type);
        }
        take(n, size);
    }

    const std::string & path_;
    const uint8_t * data_;
    uint64_t end_;
    bool goes_on_; // there are more of the file's bytes than at `data`
    bool cut_;
    uint64_t at_ = 0;
    std::string what_; // what is being read, for messages
    uint64_t n_tensors_ = 0;
    uint64_t n_keys_ = 0;
};

} // namespace

bool scan_gguf(const std::string & path, const uint8_t * data, uint64_t n, uint64_t size) {
    scanner scan(path, data, n, size);
    try {
        scan.header();
        scan.keys();
        scan.tensors();
    } catch (const more_needed &) {
        return false;
    }
    return true;
}

} // namespace kvg
