// A GGUF file: metadata and tensor directory, every size checked against the file before it is believed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ggml-cpp.h>

#include "model/override.h"

namespace kvg {

// A read-only mapping of a part of a file.
class file_window {
public:
    // Of bytes [begin, end), and those beside them on the first page. path: for messages. error(KVG_DEVICE)
    file_window(const std::string & path, int fd, uint64_t begin, uint64_t end);
    ~file_window();
    file_window(const file_window &) = delete;
    file_window & operator=(const file_window &) = delete;

    bool has(uint64_t offset) const { return begin_ <= offset && offset < begin_ + size_; }
    // offset: of the file
    const uint8_t * at(uint64_t offset) const { return data_ + (offset - begin_); }
    const uint8_t * data() const { return data_; }
    uint64_t size() const { return size_; }
    // These bytes have been copied: their pages need not stay in memory. Reading them again is fine, and slow once.
    void release(uint64_t offset, uint64_t size) const;

private:
    uint64_t begin_;
    uint64_t size_;
    uint8_t * data_;
};

// What of a file is mapped.
enum class mapping {
    whole,
    directory // while it is read: then nothing
};

// A regular file, open for reading.
class open_file {
public:
    // error(KVG_NOT_FOUND) when there is none, error(KVG_MODEL_LOAD) when it may not be opened or isn't a regular file,
    // error(KVG_DEVICE) when the system is short of descriptors
    explicit open_file(const std::string & path);
    ~open_file();
    open_file(const open_file &) = delete;
    open_file & operator=(const open_file &) = delete;

    int fd() const { return fd_; }
    uint64_t size() const { return size_; }
    // Of the whole file; nullptr: it isn't mapped.
    const file_window * whole() const { return whole_.get(); }
    // Calls read(window) with more and more of its beginning, the whole at last, until it returns true.
    template <class F> void map_beginning(const std::string & path, F && read) const {
        constexpr uint64_t FIRST = 1 << 20;
        for (uint64_t n = FIRST; !read(file_window(path, fd_, 0, std::min(n, size_))); n *= 2) {
        }
    }
    void map_whole(const std::string & path) { whole_ = std::make_unique<const file_window>(path, fd_, 0, size_); }

private:
    int fd_ = -1;
    uint64_t size_ = 0;
    std::unique_ptr<const file_window> whole_;
};

struct gguf_tensor {
    std::string name;
    ggml_type type;
    int64_t ne[4];
    uint64_t offset; // from the start of its file
    uint64_t size;
    uint32_t part;          // which file of a split model; 0 for a whole one
    const open_file * file; // that file

    // nullptr where the file isn't mapped
    const uint8_t * data() const { return file->whole() ? file->whole()->at(offset) : nullptr; }
};

// Of a split model.
enum class parts {
    all,
    this_one
};

// A file, or the files of a split model: keys are those of the first, tensors those of all.
class gguf_file {
public:
    // error(KVG_NOT_FOUND), error(KVG_MODEL_LOAD)
    // and what apply_override() raises
    explicit gguf_file(const std::string & path, parts which = parts::all, const std::vector<key_override> & overrides = {},
                       mapping how = mapping::whole);

    const std::string & path() const { return path_; }
    mapping how() const { return how_; }
    const open_file & file() const { return file_; }
    // in order; the first is this one
    uint32_t n_parts() const { return 1 + static_cast<uint32_t>(later_.size()); }
    const gguf_file & part(uint32_t index) const { return index == 0 ? *this : *later_[index - 1]; }
    const gguf_context * meta() const { return meta_.get(); }
    uint64_t n_kv() const { return static_cast<uint64_t>(gguf_get_n_kv(meta_.get())); }
    // of all parts
    const std::vector<gguf_tensor> & tensors() const { return tensors_; }
    // nullptr when absent
    const gguf_tensor * find_tensor(const std::string & name) const;

    // Typed access: nullopt when the key is absent, error(KVG_MODEL_LOAD) when it has another type. ggml's own getters abort.
    std::optional<uint64_t> get_uint(const std::string & key) const; // any integer type, not negative
    std::optional<bool> get_bool(const std::string & key) const;
    std::optional<double> get_float(const std::string & key) const;
    std::optional<std::string> get_string(const std::string & key) const;
    std::optional<uint64_t> get_array_length(const std::string & key) const;
    bool is_array(const std::string & key) const; // no, too, when the key is absent
    // n numbers: an array of so many, or a scalar that stands for all
    std::optional<std::vector<uint64_t>> get_uints(const std::string & key, uint64_t n) const;
    std::optional<std::vector<double>> get_floats(const std::string & key, uint64_t n) const;

private:
    bool read_directory(const file_window & window);
    void read_tensors();
    void add(gguf_tensor tensor);

    std::string path_;
    mapping how_;
    open_file file_;
    gguf_context_ptr meta_;
    std::vector<std::unique_ptr<const gguf_file>> later_;
    std::vector<gguf_tensor> tensors_;
    std::map<std::string, size_t> index_; // name -> place in tensors_
};

} // namespace kvg
