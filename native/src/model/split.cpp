#include "model/split.h"

#include "error.h"

namespace kvg {

namespace {

constexpr uint64_t MAX_PARTS = UINT16_MAX; // what the keys can hold

struct place {
    uint64_t no; // from 0 on
    uint64_t count;
};

uint64_t need_key(const gguf_file & file, const char * key) {
    const auto value = file.get_uint(key);
    if (!value) {
        fail(KVG_MODEL_LOAD, "%s is a part of a split model, but its key '%s' is missing: split the model again",
             file.path().c_str(), key);
    }
    return *value;
}

// Of a file that may be whole: then part 0 of 1.
place find_place(const gguf_file & file) {
    const uint64_t count = file.get_uint("split.count").value_or(1);
    if (count < 2) {
        return {0, 1};
    }
    const uint64_t no = need_key(file, "split.no");
    if (count > MAX_PARTS || no >= count) {
        fail(KVG_MODEL_LOAD,
             "%s: split.no is %llu and split.count %llu, expected a part below the count, and at most %llu parts",
             file.path().c_str(), (unsigned long long) no, (unsigned long long) count, (unsigned long long) MAX_PARTS);
    }
    return {no, count};
}

std::string suffix(uint64_t no, uint64_t count) {
    return strformat("-%05llu-of-%05llu.gguf", (unsigned long long) no + 1, (unsigned long long) count);
}

// A part's path without its suffix; empty when it ends in another one.
std::string prefix(const std::string & path, place at) {
    const std::string end = suffix(at.no, at.count);
    const bool has_it = path.size() > end.size() && path.compare(path.size() - end.size(), end.size(), end) == 0;
    return has_it ? path.substr(0, path.size() - end.size()) : "";
}

// What all the parts' names begin with. error(KVG_MODEL_LOAD) unless `file` is the first, and named so that the others can be found
std::string find_others(const gguf_file & file, place at) {
    const std::string name = prefix(file.path(), at);
    if (at.no > 0) {
        fail(KVG_MODEL_LOAD, "%s is part %llu of the %llu files of a split model: open the first, %s%s", file.path().c_str(),
             (unsigned long long) at.no + 1, (unsigned long long) at.count, name.empty() ? "whose name ends in " : name.c_str(),
             suffix(0, at.count).c_str());
    }
    if (name.empty()) {
        fail(KVG_MODEL_LOAD,
             "%s is the first of the %llu files of a split model, which are found by their names: it must end in '%s', and the "
             "others lie beside it",
             file.path().c_str(), (unsigned long long) at.count, suffix(0, at.count).c_str());
    }
    return name;
}

std::unique_ptr<const gguf_file> open_part(const gguf_file & first, const std::string & path, place at) {
    try {
        return std::make_unique<const gguf_file>(path, parts::this_one, std::vector<key_override>(), first.how());
    } catch (const error & e) {
        if (e.status() != KVG_NOT_FOUND) {
            throw;
        }
    }
    fail(KVG_MODEL_LOAD, "%s is missing: it is part %llu of the %llu files of the model that %s begins; put all of them there",
         path.c_str(), (unsigned long long) at.no + 1, (unsigned long long) at.count, first.path().c_str());
}

// The keys that tell where a part belongs are the only ones that every part has; some writers repeat others.
void check_part(const gguf_file & first, const gguf_file & part, place expected) {
    const place found = find_place(part);
    if (found.no != expected.no || found.count != expected.count) {
        fail(KVG_MODEL_LOAD,
             "%s says that it is part %llu of %llu, its name that it is part %llu of %llu: it is of another model or has the "
             "wrong name; download it again",
             part.path().c_str(), (unsigned long long) found.no + 1, (unsigned long long) found.count,
             (unsigned long long) expected.no + 1, (unsigned long long) expected.count);
    }
    const auto n_tensors = part.get_uint("split.tensors.count");
    if (n_tensors && *n_tensors != need_key(first, "split.tensors.count")) {
        fail(KVG_MODEL_LOAD, "%s is of another model than %s: one has %llu tensors in all, the other %llu; download it again",
             part.path().c_str(), first.path().c_str(), (unsigned long long) *n_tensors,
             (unsigned long long) need_key(first, "split.tensors.count"));
    }
    const auto arch = part.get_string("general.architecture");
    const std::string expected_arch = first.get_string("general.architecture").value_or("");
    if (arch && *arch != expected_arch) {
        fail(KVG_MODEL_LOAD, "%s is of another model than %s: its architecture is '%s', not '%s'; download it again",
             part.path().c_str(), first.path().c_str(), arch->c_str(), expected_arch.c_str());
    }
}

} // namespace

std::vector<std::unique_ptr<const gguf_file>> open_later_parts(const gguf_file & first) {
    std::vector<std::unique_ptr<const gguf_file>> others;
    const place at = find_place(first);
    if (at.count < 2) {
        return others;
    }
    const std::string name = find_others(first, at);
    uint64_t n_tensors = first.tensors().size();
    for (uint64_t no = 1; no < at.count; ++no) {
        const place expected = {no, at.count};
        others.push_back(open_part(first, name + suffix(no, at.count), expected));
        check_part(first, *others.back(), expected);
        n_tensors += others.back()->tensors().size();
    }
    const uint64_t n_expected = need_key(first, "split.tensors.count");
    if (n_tensors != n_expected) {
        fail(KVG_MODEL_LOAD,
             "%s: the %llu files of this model have %llu tensors, expected %llu: one of them is of another model or damaged; "
             "download them again",
             first.path().c_str(), (unsigned long long) at.count, (unsigned long long) n_tensors,
             (unsigned long long) n_expected);
    }
    return others;
}

} // namespace kvg
