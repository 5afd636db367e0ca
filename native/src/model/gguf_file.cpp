#include "model/gguf_file.h"

#include <cerrno>
#include <cstring>
#include <new>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device.h"
#include "error.h"
#include "model/gguf_scan.h"
#include "model/split.h"

namespace kvg {

namespace {

// Integer `i` of packed data of a GGUF integer type; nullopt for other types and negative values.
std::optional<uint64_t> uint_at(gguf_type type, const void * data, uint64_t i) {
    const auto load = [&](auto sample) -> std::optional<uint64_t> {
        memcpy(&sample, static_cast<const uint8_t *>(data) + i * sizeof(sample), sizeof(sample));
        if (sample < 0) {
            return std::nullopt;
        }
        return static_cast<uint64_t>(sample);
    };
    switch (type) {
    case GGUF_TYPE_UINT8:
        return load(uint8_t{});
    case GGUF_TYPE_INT8:
        return load(int8_t{});
    case GGUF_TYPE_UINT16:
        return load(uint16_t{});
    case GGUF_TYPE_INT16:
        return load(int16_t{});
    case GGUF_TYPE_UINT32:
        return load(uint32_t{});
    case GGUF_TYPE_INT32:
        return load(int32_t{});
    case GGUF_TYPE_UINT64:
        return load(uint64_t{});
    case GGUF_TYPE_INT64:
        return load(int64_t{});
    default:
        return std::nullopt;
    }
}

// What kind of failure an open's errno is.
kvg_status open_status(int code) {
    switch (code) {
    case ENOENT:
    case ENOTDIR:
        return KVG_NOT_FOUND;
    case EMFILE:
    case ENFILE:
    case ENOMEM:
        return KVG_DEVICE;
    default:
        return KVG_MODEL_LOAD;
    }
}

} // namespace

static uint64_t page_size() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

file_window::file_window(const std::string & path, int fd, uint64_t begin, uint64_t end)
    : begin_(begin / page_size() * page_size()), size_(end - begin_) {
    void * mapped = mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(begin_));
    if (mapped == MAP_FAILED) {
        fail(KVG_DEVICE, "%s: can't map %llu bytes: %s", path.c_str(), (unsigned long long) size_, strerror(errno));
    }
    data_ = static_cast<uint8_t *>(mapped);
    advise_huge_pages(data_, size_); // where the file is not in memory yet, and its filesystem reads that much at once
}

file_window::~file_window() { munmap(data_, size_); }

void file_window::release(uint64_t offset, uint64_t size) const {
    const uint64_t page = page_size();
    const uint64_t begin = (offset - begin_ + page - 1) / page * page; // neighbours on the first and last page stay
    const uint64_t end = (offset - begin_ + size) / page * page;
    if (begin < end) {
        madvise(data_ + begin, end - begin, MADV_DONTNEED); // a hint
    }
}

open_file::open_file(const std::string & path) {
    fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a FIFO must not block
    if (fd_ < 0) {
        fail(open_status(errno), "%s can't be opened: %s", path.c_str(), strerror(errno));
    }
    struct stat info = {};
    if (fstat(fd_, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size <= 0) {
        close(fd_);
        fail(KVG_MODEL_LOAD, "%s is not a GGUF file: expected a regular file that isn't empty", path.c_str());
    }
    size_ = static_cast<uint64_t>(info.st_size);
}

open_file::~open_file() { close(fd_); }

// False: more of the file must be mapped.
bool gguf_file::read_directory(const file_window & window) {
    if (!scan_gguf(path_, window.data(), window.size(), file_.size())) {
        return false;
    }
    try {
        meta_.reset(gguf_init_from_buffer(window.data(), window.size(), {/*no_alloc*/ true, /*ctx*/ nullptr}));
    } catch (const std::bad_alloc &) {
        throw; // says nothing about the file
    } catch (const std::exception &) {
        meta_.reset();
    }
    return meta_ || window.size() == file_.size(); // there may be padding behind the directory
}

gguf_file::gguf_file(const std::string & path, parts which, const std::vector<key_override> & overrides, mapping how)
    : path_(path), how_(how), file_(path) {
    if (how == mapping::whole) {
        file_.map_whole(path_);
        read_directory(*file_.whole());
    } else {
        file_.map_beginning(path_, [&](const file_window & window) { return read_directory(window); });
    }
    if (!meta_) {
        fail(KVG_MODEL_LOAD,
             "%s: ggml refuses it: a tensor's type, shape or offset can't be, or 'general.alignment' is no power of two; "
             "copy or download it again",
             path_.c_str());
    }
    for (const key_override & each : overrides) {
        apply_override(meta_.get(), path_, each);
    }
    read_tensors();
    if (which == parts::this_one) {
        return;
    }
    later_ = open_later_parts(*this);
    for (uint32_t i = 1; i < n_parts(); ++i) {
        for (gguf_tensor t : part(i).tensors()) {
            t.part = i;
            add(std::move(t));
        }
    }
}

void gguf_file::add(gguf_tensor tensor) {
    const auto [found, is_new] = index_.emplace(tensor.name, tensors_.size());
    if (!is_new) {
        fail(KVG_MODEL_LOAD, "%s: tensor '%s' is there already, in %s: one of them is of another model; download them again",
             part(tensor.part).path().c_str(), tensor.name.c_str(), part(tensors_[found->second].part).path().c_str());
    }
    tensors_.push_back(std::move(tensor));
}

void gguf_file::read_tensors() {
    const uint64_t data_offset = gguf_get_data_offset(meta_.get());
    const int64_t n = gguf_get_n_tensors(meta_.get());
    tensors_.reserve(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
        gguf_tensor t = {};
        t.file = &file_;
        t.name = gguf_get_tensor_name(meta_.get(), i);
        t.type = gguf_get_tensor_type(meta_.get(), i);
        memcpy(t.ne, gguf_get_tensor_ne(meta_.get(), i), sizeof(t.ne));
        t.size = gguf_get_tensor_size(meta_.get(), i);
        for (const int64_t extent : t.ne) {
            if (extent < 1) {
                fail(KVG_MODEL_LOAD, "%s: tensor '%s' has a dimension of %lld", path_.c_str(), t.name.c_str(),
                     static_cast<long long>(extent));
            }
        }
        const uint64_t in_data = gguf_get_tensor_offset(meta_.get(), i);
        if (__builtin_add_overflow(data_offset, in_data, &t.offset) || t.offset > file_.size() ||
            t.size > file_.size() - t.offset) {
            fail(KVG_MODEL_LOAD,
                 "%s: tensor '%s' should have %llu bytes at offset %llu, but the file ends at %llu: it is truncated or "
                 "damaged; copy or download it again",
                 path_.c_str(), t.name.c_str(), (unsigned long long) t.size, (unsigned long long) t.offset,
                 (unsigned long long) file_.size());
        }
        add(std::move(t));
    }
}

const gguf_tensor * gguf_file::find_tensor(const std::string & name) const {
    const auto found = index_.find(name);
    return found == index_.end() ? nullptr : &tensors_[found->second];
}

static const char * type_at(const gguf_context * meta, int64_t id) {
    return gguf_get_kv_type(meta, id) == GGUF_TYPE_ARRAY ? "an array" : gguf_type_name(gguf_get_kv_type(meta, id));
}

std::optional<uint64_t> gguf_file::get_uint(const std::string & key) const {
    const int64_t id = gguf_find_key(meta_.get(), key.c_str());
    if (id < 0) {
        return std::nullopt;
    }
    const gguf_type type = gguf_get_kv_type(meta_.get(), id);
    if (type != GGUF_TYPE_ARRAY && type != GGUF_TYPE_STRING) {
        if (const auto value = uint_at(type, gguf_get_val_data(meta_.get(), id), 0)) {
            return value;
        }
    }
    fail(KVG_MODEL_LOAD, "%s: key '%s' is %s, expected an integer of at least 0", path_.c_str(), key.c_str(),
         type_at(meta_.get(), id));
}

std::optional<bool> gguf_file::get_bool(const std::string & key) const {
    const int64_t id = gguf_find_key(meta_.get(), key.c_str());
    if (id < 0) {
        return std::nullopt;
    }
    if (gguf_get_kv_type(meta_.get(), id) != GGUF_TYPE_BOOL) {
        fail(KVG_MODEL_LOAD, "%s: key '%s' is %s, expected yes or no", path_.c_str(), key.c_str(), type_at(meta_.get(), id));
    }
    return gguf_get_val_bool(meta_.get(), id);
}

std::optional<double> gguf_file::get_float(const std::string & key) const {
    const int64_t id = gguf_find_key(meta_.get(), key.c_str());
    if (id < 0) {
        return std::nullopt;
    }
    switch (gguf_get_kv_type(meta_.get(), id)) {
    case GGUF_TYPE_FLOAT32:
        return gguf_get_val_f32(meta_.get(), id);
    case GGUF_TYPE_FLOAT64:
        return gguf_get_val_f64(meta_.get(), id);
    default:
        fail(KVG_MODEL_LOAD, "%s: key '%s' is %s, expected a float", path_.c_str(), key.c_str(), type_at(meta_.get(), id));
    }
}

std::optional<std::string> gguf_file::get_string(const std::string & key) const {
    const int64_t id = gguf_find_key(meta_.get(), key.c_str());
    if (id < 0) {
        return std::nullopt;
    }
    if (gguf_get_kv_type(meta_.get(), id) != GGUF_TYPE_STRING) {
        fail(KVG_MODEL_LOAD, "%s: key '%s' is %s, expected a string", path_.c_str(), key.c_str(), type_at(meta_.get(), id));
    }
    return std::string(gguf_get_val_str(meta_.get(), id));
}

std::optional<uint64_t> gguf_file::get_array_length(const std::string & key) const {
    const int64_t id = gguf_find_key(meta_.get(), key.c_str());
    if (id < 0) {
        return std::nullopt;
    }
    if (gguf_get_kv_type(meta_.get(), id) != GGUF_TYPE_ARRAY) {
        fail(KVG_MODEL_LOAD, "%s: key '%s' is %s, expected an array", path_.c_str(), key.c_str(), type_at(meta_.get(), id));
    }
    return gguf_get_arr_n(meta_.get(), id);
}

bool gguf_file::is_array(const std::string & key) const {
    const int64_t id = gguf_find_key(meta_.get(), key.c_str());
    return id >= 0 && gguf_get_kv_type(meta_.get(), id) == GGUF_TYPE_ARRAY;
}

std::optional<std::vector<uint64_t>> gguf_file::get_uints(const std::string & key, uint64_t n) const {
    const int64_t id = gguf_find_key(meta_.get(), key.c_str());
    if (id < 0) {
        return std::nullopt;
    }
    if (gguf_get_kv_type(meta_.get(), id) != GGUF_TYPE_ARRAY) {
        return std::vector<uint64_t>(n, *get_uint(key));
    }
    const gguf_type type = gguf_get_arr_type(meta_.get(), id);
    const uint64_t length = gguf_get_arr_n(meta_.get(), id);
    if (length != n || type == GGUF_TYPE_STRING) {
        fail(KVG_MODEL_LOAD, "%s: key '%s' has %llu items, expected %llu integers, one per layer", path_.c_str(), key.c_str(),
             (unsigned long long) length, (unsigned long long) n);
    }
    std::vector<uint64_t> values;
    for (uint64_t i = 0; i < n; ++i) {
        const auto value = uint_at(type == GGUF_TYPE_BOOL ? GGUF_TYPE_UINT8 : type, gguf_get_arr_data(meta_.get(), id), i);
        if (!value) {
            fail(KVG_MODEL_LOAD, "%s: key '%s' holds something that isn't an integer of at least 0", path_.c_str(),
                 key.c_str());
        }
        values.push_back(*value);
    }
    return values;
}

std::optional<std::vector<double>> gguf_file::get_floats(const std::string & key, uint64_t n) const {
    if (!is_array(key)) {
        const auto value = get_float(key);
        return value ? std::optional(std::vector<double>(n, *value)) : std::nullopt;
    }
    const int64_t id = gguf_find_key(meta_.get(), key.c_str());
    if (gguf_get_arr_n(meta_.get(), id) != n || gguf_get_arr_type(meta_.get(), id) != GGUF_TYPE_FLOAT32) {
        fail(KVG_MODEL_LOAD, "%s: key '%s' has %llu items, expected %llu floats of 32 bits, one per layer", path_.c_str(),
             key.c_str(), (unsigned long long) gguf_get_arr_n(meta_.get(), id), (unsigned long long) n);
    }
    const auto * values = static_cast<const float *>(gguf_get_arr_data(meta_.get(), id));
    return std::vector<double>(values, values + n);
}

} // namespace kvg
