#include "model/vocab_check.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <numeric>
#include <string_view>
#include <utility>

#include "error.h"
#include "model/vocab_kinds.h"

namespace kvg {

namespace {

constexpr uint64_t MAX_TOKENS = 1 << 20; // the largest vocabularies have 2^18

// libllama decodes each token of a byte-level vocabulary once, and writes a token's whole text for each character of it that is none of
// the 256: length squared. Real vocabularies have up to 2^26 in all.
constexpr uint64_t MAX_SQUARES = 1 << 28;

// libllama looks for each tensor among all of them: quadratic. No model that we have a recipe for comes near.
constexpr uint64_t MAX_TENSORS = 1 << 14;

constexpr uint32_t NO_TOKEN = UINT32_MAX; // -1, as some converters write it

struct typed_key {
    const char * name;
    gguf_type type;
    bool is_array;
};

const typed_key optional_keys[] = {
    {"general.name", GGUF_TYPE_STRING, false},
    {"general.file_type", GGUF_TYPE_UINT32, false},
    {"split.count", GGUF_TYPE_UINT16, false},
    {"tokenizer.chat_template", GGUF_TYPE_STRING, false},
    {"tokenizer.ggml.pre", GGUF_TYPE_STRING, false},
    {"tokenizer.ggml.token_type_count", GGUF_TYPE_UINT32, false},
    {"tokenizer.ggml.add_bos_token", GGUF_TYPE_BOOL, false},
    {"tokenizer.ggml.add_eos_token", GGUF_TYPE_BOOL, false},
    {"tokenizer.ggml.add_sep_token", GGUF_TYPE_BOOL, false},
    {"tokenizer.ggml.add_space_prefix", GGUF_TYPE_BOOL, false},
    {"tokenizer.ggml.remove_extra_whitespaces", GGUF_TYPE_BOOL, false},
    {"tokenizer.ggml.normalizer.lowercase", GGUF_TYPE_BOOL, false},
    {"tokenizer.ggml.normalizer.strip_accents", GGUF_TYPE_BOOL, false},
    {"tokenizer.ggml.suppress_tokens", GGUF_TYPE_INT32, true},
};

// tokenizer.ggml.<name>_token_id
const char * const special_tokens[] = {"bos",     "eos",     "eot",     "eom",     "unknown", "seperator",
                                       "padding", "cls",     "mask",    "fim_pre", "fim_suf", "fim_mid",
                                       "fim_pad", "fim_rep", "fim_sep", "prefix",  "suffix",  "middle"};

// The values of tokenizer.ggml.token_type
enum token_type : int32_t {
    UNDEFINED,
    NORMAL,
    UNKNOWN,
    CONTROL,
    USER_DEFINED,
    UNUSED,
    BYTE
};

std::string type_text(gguf_type type, bool is_array) {
    return std::string(is_array ? "an array of " : "") + gguf_type_name(type);
}

// A key's index; -1 when it is absent. error(KVG_MODEL_LOAD) when it has another type: ggml's getters abort then.
int64_t find_key(const gguf_file & file, const typed_key & key) {
    const gguf_context * meta = file.meta();
    const int64_t id = gguf_find_key(meta, key.name);
    if (id < 0) {
        return id;
    }
    const bool is_array = gguf_get_kv_type(meta, id) == GGUF_TYPE_ARRAY;
    const gguf_type type = is_array ? gguf_get_arr_type(meta, id) : gguf_get_kv_type(meta, id);
    if (type != key.type || is_array != key.is_array) {
        fail(KVG_MODEL_LOAD, "%s: key '%s' is %s, expected %s", file.path().c_str(), key.name,
             type_text(type, is_array).c_str(), type_text(key.type, key.is_array).c_str());
    }
    return id;
}

// Items of an array with one for each token; nullptr when the key is absent.
template <class T> const T * per_token(const gguf_file & file, const char * name, gguf_type type, uint64_t n_tokens) {
    const int64_t id = find_key(file, {name, type, true});
    if (id < 0) {
        return nullptr;
    }
    const uint64_t n = gguf_get_arr_n(file.meta(), id);
    if (n != n_tokens) {
        fail(KVG_MODEL_LOAD, "%s: %s has %llu items, expected one for each of the %llu tokens", file.path().c_str(), name,
             (unsigned long long) n, (unsigned long long) n_tokens);
    }
    return static_cast<const T *>(gguf_get_arr_data(file.meta(), id));
}

// "<0x0A>"
bool is_byte_token(std::string_view text) {
    return text.size() == 6 && text.substr(0, 3) == "<0x" && text[5] == '>' && isxdigit(static_cast<unsigned char>(text[3])) &&
           isxdigit(static_cast<unsigned char>(text[4]));
}

// The kinds of BPE that have a list of merges.
bool is_merged(const std::string & kind) {
    return kind == "gpt2" || kind == "gemma4" || kind == "hybriddna" || kind == "whitespace";
}

// Whatever is not listed here would need its own checks.
std::string read_kind(const gguf_file & file) {
    const int64_t id = find_key(file, {"tokenizer.ggml.model", GGUF_TYPE_STRING, false});
    if (id < 0) {
        fail(KVG_MODEL_LOAD, "%s has no tokenizer: key 'tokenizer.ggml.model' is missing", file.path().c_str());
    }
    const std::string kind = gguf_get_val_str(file.meta(), id);
    if (kind != "llama" && !is_merged(kind) && !is_checked_kind(kind)) {
        fail(KVG_UNSUPPORTED,
             "%s: tokenizer.ggml.model is '%s', and there is no check that libllama is safe with it: expected 'llama' "
             "(SentencePiece "
             "BPE), 'gpt2' (byte-level BPE), 'gemma4', 'hybriddna', 'whitespace', 'bert', 't5', 'rwkv' or 'plamo2'",
             file.path().c_str(), kind.c_str());
    }
    return kind;
}

// libllama reads more of the file than the vocabulary.
void check_rest(const gguf_file & file) {
    if (file.tensors().size() > MAX_TENSORS) {
        fail(KVG_UNSUPPORTED, "%s has %zu tensors, expected at most %llu", file.path().c_str(), file.tensors().size(),
             (unsigned long long) MAX_TENSORS);
    }
}

// The tokens' texts as libllama will have them; `made` owns those that are not the file's.
token_list read_tokens(const gguf_file & file, std::deque<std::string> & made) {
    const int64_t id = find_key(file, {"tokenizer.ggml.tokens", GGUF_TYPE_STRING, true});
    const uint64_t n = id < 0 ? 0 : gguf_get_arr_n(file.meta(), id);
    if (n == 0 || n > MAX_TOKENS) {
        fail(KVG_MODEL_LOAD, "%s: tokenizer.ggml.tokens has %llu tokens, expected 1 to %llu", file.path().c_str(),
             (unsigned long long) n, (unsigned long long) MAX_TOKENS);
    }
    token_list tokens;
    tokens.reserve(n);
    uint64_t squares = 0;
    for (uint64_t i = 0; i < n; ++i) {
        const char * text = gguf_get_arr_str(file.meta(), id, i);
        if (*text == '\0') {
            text = made.emplace_back(strformat("[EMPTY_%llu]", (unsigned long long) i)).c_str();
        }
        tokens.emplace_back(text);
        squares += static_cast<uint64_t>(tokens.back().size()) * tokens.back().size();
        if (squares > MAX_SQUARES) {
            fail(KVG_MODEL_LOAD, "%s: the tokens up to %llu, which has %zu bytes, are longer than those of any real vocabulary",
                 file.path().c_str(), (unsigned long long) i, tokens.back().size());
        }
    }
    return tokens;
}

void check_unique(const gguf_file & file, const token_list & tokens) {
    // Some bits of a token's hash choose a bucket, others come along. There are as many buckets as tokens, so that few have two; whoever
    // makes texts that meet in one has it sorted.
    struct entry {
        uint32_t hash;
        uint32_t token;
    };
    size_t n_buckets = 1;
    while (n_buckets < tokens.size()) {
        n_buckets *= 2;
    }
    const uint64_t mask = n_buckets - 1;
    std::vector<uint64_t> hashes;
    std::vector<uint32_t> ends(n_buckets + 1); // of the bucket before, then of the bucket itself
    hashes.reserve(tokens.size());
    for (const std::string_view token : tokens) {
        hashes.push_back(std::hash<std::string_view>{}(token));
        ++ends[(hashes.back() & mask) + 1];
    }
    std::partial_sum(ends.begin(), ends.end(), ends.begin());
    std::vector<entry> order(tokens.size());
    for (uint32_t i = 0; i < tokens.size(); ++i) {
        order[ends[hashes[i] & mask]++] = {static_cast<uint32_t>(hashes[i] >> 32), i};
    }
    const auto compared = [&](const entry & a, const entry & b) {
        return a.hash != b.hash ? (a.hash < b.hash ? -1 : 1) : tokens[a.token].compare(tokens[b.token]);
    };
    for (size_t begin = 0, bucket = 0; bucket < n_buckets; begin = ends[bucket++]) {
        const auto first = order.begin() + begin, last = order.begin() + ends[bucket];
        std::sort(first, last, [&](const entry & a, const entry & b) {
            const int difference = compared(a, b);
            return difference != 0 ? difference < 0 : a.token < b.token;
        });
        const auto same =
            std::adjacent_find(first, last, [&](const entry & a, const entry & b) { return compared(a, b) == 0; });
        if (same != last) {
            fail(KVG_MODEL_LOAD, "%s: tokenizer.ggml.tokens has '%.100s' twice, at %u and %u", file.path().c_str(),
                 tokens[same[0].token].data(), same[0].token, same[1].token);
        }
    }
}

void check_types(const gguf_file & file, const token_list & tokens) {
    const auto * types = per_token<int32_t>(file, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, tokens.size());
    for (size_t i = 0; types && i < tokens.size(); ++i) {
        const int32_t type = types[i];
        if (type < UNDEFINED || type > BYTE) {
            fail(KVG_MODEL_LOAD, "%s: token %zu has type %d, expected %d to %d", file.path().c_str(), i, type, UNDEFINED, BYTE);
        }
        if (type == BYTE && !is_byte_token(tokens[i])) {
            fail(KVG_MODEL_LOAD, "%s: token %zu is a byte, but its text is '%.100s', expected the form '<0x0A>'",
                 file.path().c_str(), i, tokens[i].data());
        }
        // these are cut out of a text wherever they occur in it; half a character would leave the other half, which nothing stands for
        const bool is_cut_out = type == UNKNOWN || type == CONTROL || type == USER_DEFINED;
        if (is_cut_out && !is_utf8(tokens[i])) {
            fail(KVG_MODEL_LOAD, "%s: token %zu, of type %d, is not UTF-8", file.path().c_str(), i, type);
        }
    }
}

void check_scores(const gguf_file & file, uint64_t n_tokens) {
    const char * name = "tokenizer.ggml.scores";
    const int64_t id = gguf_find_key(file.meta(), name);
    if (id >= 0 && gguf_get_kv_type(file.meta(), id) == GGUF_TYPE_ARRAY &&
        gguf_get_arr_type(file.meta(), id) == GGUF_TYPE_INT32) {
        per_token<int32_t>(file, name, GGUF_TYPE_INT32, n_tokens);
        return;
    }
    const auto * scores = per_token<float>(file, name, GGUF_TYPE_FLOAT32, n_tokens);
    for (uint64_t i = 0; scores && i < n_tokens; ++i) {
        if (std::isnan(scores[i])) {
            fail(KVG_MODEL_LOAD, "%s: the score of token %llu is not a number", file.path().c_str(), (unsigned long long) i);
        }
    }
}

void check_special_tokens(const gguf_file & file, uint64_t n_tokens) {
    for (const char * name : special_tokens) {
        const std::string key = strformat("tokenizer.ggml.%s_token_id", name);
        const int64_t id = find_key(file, {key.c_str(), GGUF_TYPE_UINT32, false});
        const uint32_t token = id < 0 ? NO_TOKEN : gguf_get_val_u32(file.meta(), id);
        if (token != NO_TOKEN && token >= n_tokens) {
            fail(KVG_MODEL_LOAD, "%s: %s is %u, expected a token: 0 to %llu", file.path().c_str(), key.c_str(), token,
                 (unsigned long long) n_tokens - 1);
        }
    }
}

// Two token texts and a blank between them; a merge that is none would stand for nothing.
void check_merges(const gguf_file & file, const std::string & pre) {
    const int64_t id = find_key(file, {"tokenizer.ggml.merges", GGUF_TYPE_STRING, true});
    if (id < 0 && pre != "kimi-k2") {
        fail(KVG_MODEL_LOAD, "%s: key 'tokenizer.ggml.merges' is missing", file.path().c_str());
    }
    const uint64_t n = id < 0 ? 0 : gguf_get_arr_n(file.meta(), id);
    for (uint64_t i = 0; i < n; ++i) {
        const std::string_view merge = gguf_get_arr_str(file.meta(), id, i);
        const size_t blank = merge.find(' ', 1);
        if (blank == std::string_view::npos || blank + 1 == merge.size()) {
            fail(KVG_MODEL_LOAD, "%s: merge %llu is '%.100s', expected two tokens and a blank between them",
                 file.path().c_str(), (unsigned long long) i, merge.data());
        }
    }
}

void check_merged(const gguf_file & file, const std::string & kind) {
    // libllama splits texts in Gemma 4's own way, whatever the key says
    const std::string pre = kind == "gemma4" ? kind : file.get_string("tokenizer.ggml.pre").value_or("");
    // leaves runs of blanks in the text, on which libllama's merging asserts that there are none
    if (pre == "whitespace" && kind != "whitespace") {
        fail(KVG_UNSUPPORTED, "%s: tokenizer.ggml.pre is 'whitespace', which goes with another kind of tokenizer",
             file.path().c_str());
    }
    check_merges(file, pre);
}

} // namespace

bool is_utf8(std::string_view text) {
    for (size_t i = 0; i < text.size();) {
        const auto lead = static_cast<uint8_t>(text[i]);
        const size_t length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
        if (length == 0 || length > text.size() - i) {
            return false;
        }
        uint32_t code = length == 1 ? lead : lead & (0x7Fu >> length);
        for (size_t k = 1; k < length; ++k) {
            const auto byte = static_cast<uint8_t>(text[i + k]);
            if ((byte & 0xC0) != 0x80) {
                return false;
            }
            code = code << 6 | (byte & 0x3F);
        }
        const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
        if (overlong || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
            return false;
        }
        i += length;
    }
    return true;
}

void check_vocab(const gguf_file & file) {
    if (find_key(file, {"general.architecture", GGUF_TYPE_STRING, false}) < 0) {
        fail(KVG_MODEL_LOAD, "%s: key 'general.architecture' is missing", file.path().c_str());
    }
    const std::string kind = read_kind(file);
    for (const typed_key & key : optional_keys) {
        find_key(file, key);
    }
    check_rest(file);
    std::deque<std::string> made;
    const token_list tokens = read_tokens(file, made);
    check_unique(file, tokens);
    check_types(file, tokens);
    check_scores(file, tokens.size());
    check_special_tokens(file, tokens.size());
    if (is_merged(kind)) {
        check_merged(file, kind);
    }
    check_kind(file, kind, tokens);
}

} // namespace kvg
