#include "model/metadata.h"

#include "error.h"

namespace kvg {

template <class T> T metadata::present(const char * key, std::optional<T> value) const {
    if (!value) {
        fail(KVG_MODEL_LOAD, "%s: key '%s%s' is missing", file_.path().c_str(), prefix_.c_str(), key);
    }
    return *value;
}

float metadata::bounded(const char * key, double value, float lowest, float highest) const {
    if (!(value >= static_cast<double>(lowest) && value <= static_cast<double>(highest))) {
        fail(KVG_MODEL_LOAD, "%s: '%s%s' is %g, expected %g to %g", file_.path().c_str(), prefix_.c_str(), key, value,
             static_cast<double>(lowest), static_cast<double>(highest));
    }
    return static_cast<float>(value);
}

uint32_t metadata::bounded(const char * key, uint64_t value, uint64_t lowest, uint64_t highest) const {
    if (value < lowest || value > highest) {
        fail(KVG_MODEL_LOAD, "%s: '%s%s' is %llu, expected %llu to %llu", file_.path().c_str(), prefix_.c_str(), key,
             (unsigned long long) value, (unsigned long long) lowest, (unsigned long long) highest);
    }
    return static_cast<uint32_t>(value);
}

std::vector<uint32_t> metadata::bounded(const char * key, const std::vector<uint64_t> & values, uint64_t lowest,
                                        uint64_t highest) const {
    std::vector<uint32_t> out;
    for (const uint64_t value : values) {
        out.push_back(bounded(key, value, lowest, highest));
    }
    return out;
}

uint32_t metadata::required(const char * key, uint64_t lowest, uint64_t highest) const {
    return bounded(key, present(key, file_.get_uint(prefix_ + key)), lowest, highest);
}

uint32_t metadata::optional(const char * key, uint32_t fallback, uint64_t lowest, uint64_t highest) const {
    return bounded(key, file_.get_uint(prefix_ + key).value_or(fallback), lowest, highest);
}

std::vector<uint32_t> metadata::required_per_layer(const char * key, uint64_t n_layer, uint64_t lowest,
                                                   uint64_t highest) const {
    return bounded(key, present(key, file_.get_uints(prefix_ + key, n_layer)), lowest, highest);
}

std::vector<uint32_t> metadata::optional_per_layer(const char * key, const std::vector<uint32_t> & fallback, uint64_t lowest,
                                                   uint64_t highest) const {
    const auto found = file_.get_uints(prefix_ + key, fallback.size());
    return found ? bounded(key, *found, lowest, highest) : fallback;
}

float metadata::required_number(const char * key, float lowest, float highest) const {
    return bounded(key, present(key, file_.get_float(prefix_ + key)), lowest, highest);
}

float metadata::optional_number(const char * key, float fallback, float lowest, float highest) const {
    return bounded(key, file_.get_float(prefix_ + key).value_or(static_cast<double>(fallback)), lowest, highest);
}

std::optional<std::vector<bool>> metadata::pattern(const char * key, uint64_t n_layer) const {
    if (!is_array(key)) {
        const auto period = file_.get_uint(prefix_ + key);
        return period ? std::optional(all_but_every(bounded(key, *period, 0, MAX_WIDTH), n_layer)) : std::nullopt;
    }
    const auto found = file_.get_uints(prefix_ + key, n_layer);
    std::vector<bool> out;
    for (const uint64_t value : *found) {
        out.push_back(bounded(key, value, 0, 1) != 0);
    }
    return out;
}

std::vector<bool> all_but_first_of(const metadata & in, const char * key, uint32_t period, uint64_t n_layer) {
    if (in.is_array(key)) {
        return *in.pattern(key, n_layer);
    }
    period = in.optional(key, period, 0, metadata::MAX_WIDTH);
    std::vector<bool> out(n_layer);
    for (uint64_t il = 0; il < n_layer; ++il) {
        out[il] = period == 0 || il % period != 0;
    }
    return out;
}

std::vector<bool> all_but_every(uint32_t period, uint64_t n_layer) {
    std::vector<bool> out(n_layer);
    for (uint64_t il = 0; il < n_layer; ++il) {
        out[il] = period == 0 || il % period + 1 < period;
    }
    return out;
}

} // namespace kvg
