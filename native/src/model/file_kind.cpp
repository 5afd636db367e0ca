#include "model/file_kind.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <string_view>

namespace kvg {

namespace {

constexpr const char * CONVERT = "convert the model with llama.cpp's convert_hf_to_gguf.py";
constexpr uint64_t LONGEST_LOOK = 4096;

struct beginning {
    std::string_view bytes;
    const char * is;
    const char * remedy;
};

const beginning beginnings[] = {
    {"version https://git-lfs.github.com/spec/", "a Git LFS pointer, not the file that it stands for",
     "run 'git lfs pull' in its folder, or download the file itself"},
    {{"PK\3\4", 4}, "a zip archive, as PyTorch writes its checkpoints", CONVERT},
    {{"\x80\2", 2}, "a Python pickle, as PyTorch writes its checkpoints", CONVERT},
    {{"\x80\3", 2}, "a Python pickle", CONVERT},
    {{"\x80\4", 2}, "a Python pickle", CONVERT},
    {{"\x80\5", 2}, "a Python pickle", CONVERT},
    {{"\x89HDF\r\n", 6}, "an HDF5 file, as Keras writes its weights", CONVERT},
    {{"\x1f\x8b", 2}, "compressed with gzip", "unpack it first"},
    {{"\xfd"
      "7zXZ",
      5},
     "compressed with xz",
     "unpack it first"},
    {{"\x28\xb5\x2f\xfd", 4}, "compressed with zstd", "unpack it first"},
    {{"7z\xbc\xaf", 4}, "a 7z archive", "unpack it first"},
    // ggml's formats before August 2023
    {"lmgg", "a model file of ggml from before GGUF", "download the model as a GGUF"},
    {"fmgg", "a model file of ggml from before GGUF", "download the model as a GGUF"},
    {"tjgg", "a model file of ggml from before GGUF", "download the model as a GGUF"},
    {"algg", "a LoRA adapter of ggml from before GGUF", "convert it again"},
};

// The start of a text in lower case, without blanks and a byte-order mark in front.
std::string text_start(std::string_view head) {
    if (head.substr(0, 3) == "\xef\xbb\xbf") {
        head.remove_prefix(3);
    }
    const size_t start = head.find_first_not_of(" \t\r\n");
    std::string text(start == std::string_view::npos ? std::string_view() : head.substr(start, 16));
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return static_cast<char>(tolower(c)); });
    return text;
}

// Eight bytes of length, and a JSON object of that length.
bool is_safetensors(const uint8_t * data, uint64_t size) {
    uint64_t length = 0;
    if (size < 10) {
        return false;
    }
    memcpy(&length, data, sizeof(length));
    return length >= 2 && length <= size - 8 && data[8] == '{' && (data[9] == '"' || data[9] == '}' || data[9] == ' ');
}

} // namespace

std::string tell_file_kind(const uint8_t * data, uint64_t size) {
    const std::string_view head(reinterpret_cast<const char *>(data), std::min(size, LONGEST_LOOK));
    for (const beginning & known : beginnings) {
        if (head.substr(0, known.bytes.size()) == known.bytes) {
            return std::string("is ") + known.is + ": " + known.remedy;
        }
    }
    if (is_safetensors(data, size)) {
        return std::string("is a safetensors file: ") + CONVERT;
    }
    const std::string text = text_start(head);
    const auto begins = [&](std::string_view with) { return std::string_view(text).substr(0, with.size()) == with; };
    if (begins("<!doctype") || begins("<html") || begins("<?xml") || begins("<head") || begins("<script")) {
        return "is a web page: the download got a page, of an error or a login, in place of the file; download it again";
    }
    if (begins("{\"") || begins("{\n") || begins("{ ") || begins("{}")) {
        return "is a JSON text: an error message or an index in place of the model; download the GGUF itself";
    }
    if (!head.empty() && head.find_first_not_of('\0') == std::string_view::npos) {
        return "begins with nothing but zeros: a download that was never finished; download it again";
    }
    return "";
}

} // namespace kvg
