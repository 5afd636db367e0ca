// The numbers of a file's metadata that belong to its architecture, `<arch>.<key>`, each within bounds.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "model/gguf_file.h"

namespace kvg {

// What the readers here raise is error(KVG_MODEL_LOAD), with the file, the key and the bounds.
class metadata {
public:
    static constexpr uint64_t MAX_WIDTH = 1 << 20;
    static constexpr uint64_t MAX_POSITION = (uint64_t{1} << 31) - 1;

    metadata(const gguf_file & file, const std::string & arch) : file_(file), prefix_(arch + ".") {}

    const gguf_file & file() const { return file_; }

    uint32_t required(const char * key, uint64_t lowest, uint64_t highest) const;
    uint32_t optional(const char * key, uint32_t fallback, uint64_t lowest, uint64_t highest) const;
    // A number for each layer, at least `lowest`: one for all, or an array.
    std::vector<uint32_t> required_per_layer(const char * key, uint64_t n_layer, uint64_t lowest, uint64_t highest) const;
    std::vector<uint32_t> optional_per_layer(const char * key, const std::vector<uint32_t> & fallback, uint64_t lowest,
                                             uint64_t highest) const;
    float required_number(const char * key, float lowest, float highest) const;
    float optional_number(const char * key, float fallback, float lowest, float highest) const;
    std::optional<std::string> text(const char * key) const { return file_.get_string(prefix_ + key); }
    std::optional<bool> flag(const char * key) const { return file_.get_bool(prefix_ + key); }
    bool is_array(const char * key) const { return file_.is_array(prefix_ + key); }
    // Yes or no for each layer: an array, or every n-th layer, counted from 1, says no; nullopt when the key is absent.
    std::optional<std::vector<bool>> pattern(const char * key, uint64_t n_layer) const;

private:
    template <class T> T present(const char * key, std::optional<T> value) const;
    float bounded(const char * key, double value, float lowest, float highest) const;
    uint32_t bounded(const char * key, uint64_t value, uint64_t lowest, uint64_t highest) const;
    std::vector<uint32_t> bounded(const char * key, const std::vector<uint64_t> & values, uint64_t lowest,
                                  uint64_t highest) const;

    const gguf_file & file_;
    std::string prefix_;
};

// The same where the first of every so many layers says no: an array, a period, or `period` where the key is absent.
std::vector<bool> all_but_first_of(const metadata & in, const char * key, uint32_t period, uint64_t n_layer);

// Of n layers, all but every period-th; period 0: all.
std::vector<bool> all_but_every(uint32_t period, uint64_t n_layer);

} // namespace kvg
