#include "model/vocab_kinds.h"

#include <algorithm>
#include <cstring>

#include "error.h"
#include "model/charsmap.h"
#include "model/vocab_check.h"

namespace kvg {

namespace {

// libllama's tries are as deep as the longest token, and freed by recursion; WordPiece tries every length up to it at each character.
// Real vocabularies have tokens of up to 128 bytes.
constexpr size_t MAX_TOKEN_BYTES = 512;

// PLaMo's table is built from all pieces of all ends of a token: length cubed. Its own vocabulary has 2^27 in all.
constexpr uint64_t MAX_CUBES = 1 << 30;

constexpr int32_t BYTE = 6; // a value of tokenizer.ggml.token_type

void check_lengths(const gguf_file & file, const token_list & tokens) {
    uint64_t cubes = 0;
    for (size_t i = 0; i < tokens.size(); ++i) {
        const uint64_t n = tokens[i].size();
        cubes += n * n * n;
        if (n > MAX_TOKEN_BYTES || cubes > MAX_CUBES) {
            fail(KVG_MODEL_LOAD, "%s: the tokens up to %zu, which has %zu bytes, are longer than those of any real vocabulary",
                 file.path().c_str(), i, tokens[i].size());
        }
    }
}

// A special token that libllama puts into texts without asking whether there is one.
void require_token(const gguf_file & file, const char * name, uint32_t by_default, const token_list & tokens) {
    const std::string key = strformat("tokenizer.ggml.%s_token_id", name);
    const int64_t id = gguf_find_key(file.meta(), key.c_str());
    const uint32_t named = id < 0 ? UINT32_MAX : gguf_get_val_u32(file.meta(), id);
    if (named >= tokens.size() && by_default >= tokens.size()) {
        fail(KVG_MODEL_LOAD, "%s: %s is missing, and token %u, which stands for it then, is not among the %zu tokens",
             file.path().c_str(), key.c_str(), by_default, tokens.size());
    }
}

const int32_t * token_types(const gguf_file & file) {
    const int64_t id = gguf_find_key(file.meta(), "tokenizer.ggml.token_type");
    return id < 0 ? nullptr : static_cast<const int32_t *>(gguf_get_arr_data(file.meta(), id));
}

void check_word_piece(const gguf_file & file, const token_list & tokens) {
    require_token(file, "bos", 101, tokens);
    require_token(file, "unknown", 100, tokens);
    require_token(file, "seperator", 102, tokens);
    const int32_t * types = token_types(file);
    for (size_t i = 0; types && i < tokens.size(); ++i) {
        if (types[i] == BYTE) {
            fail(KVG_MODEL_LOAD, "%s: token %zu is a byte, and a 'bert' vocabulary has none", file.path().c_str(), i);
        }
    }
}

void check_unigram(const gguf_file & file, const token_list & tokens) {
    require_token(file, "unknown", 2, tokens);
    const int64_t id = gguf_find_key(file.meta(), "tokenizer.ggml.precompiled_charsmap");
    if (id < 0) {
        return;
    }
    const bool is_array = gguf_get_kv_type(file.meta(), id) == GGUF_TYPE_ARRAY;
    const gguf_type type = is_array ? gguf_get_arr_type(file.meta(), id) : GGUF_TYPE_COUNT;
    if (type != GGUF_TYPE_INT8 && type != GGUF_TYPE_UINT8) {
        fail(KVG_MODEL_LOAD, "%s: key 'tokenizer.ggml.precompiled_charsmap' is no array of bytes", file.path().c_str());
    }
    const char * reason = charsmap_error(gguf_get_arr_data(file.meta(), id), gguf_get_arr_n(file.meta(), id));
    if (reason) {
        fail(KVG_MODEL_LOAD, "%s: tokenizer.ggml.precompiled_charsmap %s", file.path().c_str(), reason);
    }
}

// The bytes of a token as libllama reads it, if it is one byte: itself, or \t, \n, \r, \xe4, \\ and the like. -1 if not.
int single_byte(std::string_view token) {
    if (token.size() == 1) {
        return token[0] == '\\' ? -1 : static_cast<uint8_t>(token[0]);
    }
    if (token[0] != '\\') {
        return -1;
    }
    if (token.size() == 2 && token[1] != 'x') {
        return token[1] == 't' ? '\t' : token[1] == 'n' ? '\n' : token[1] == 'r' ? '\r' : static_cast<uint8_t>(token[1]);
    }
    const std::string digits = "0123456789abcdef";
    if (token.size() != 4 || token[1] != 'x') {
        return -1;
    }
    const size_t high = digits.find(token[2]), low = digits.find(token[3]);
    return high == std::string::npos || low == std::string::npos ? -1 : static_cast<int>(high * 16 + low);
}

// libllama takes the longest token that fits; where none did, it would try again for ever.
void check_bytes(const gguf_file & file, const token_list & tokens) {
    bool found[256] = {};
    for (const std::string_view token : tokens) {
        const int byte = single_byte(token);
        if (byte >= 0) {
            found[byte] = true;
        }
    }
    const auto * missing = std::find(std::begin(found), std::end(found), false);
    if (missing != std::end(found)) {
        fail(KVG_MODEL_LOAD, "%s: no token of this 'rwkv' vocabulary is the byte 0x%02X, expected one for each byte",
             file.path().c_str(), static_cast<unsigned>(missing - std::begin(found)));
    }
}

// libllama takes tokens apart into characters, and looks for the parts.
void check_characters(const gguf_file & file, const token_list & tokens) {
    for (size_t i = 0; i < tokens.size(); ++i) {
        if (!is_utf8(tokens[i])) {
            fail(KVG_MODEL_LOAD, "%s: token %zu of this 'plamo2' vocabulary is not UTF-8", file.path().c_str(), i);
        }
    }
}

struct kind_check {
    const char * kind;
    void (*check)(const gguf_file &, const token_list &);
};

const kind_check checks[] = {
    {"bert", check_word_piece}, {"t5", check_unigram}, {"rwkv", check_bytes}, {"plamo2", check_characters}};

} // namespace

bool is_checked_kind(const std::string & kind) {
    return std::any_of(std::begin(checks), std::end(checks), [&](const kind_check & c) { return kind == c.kind; });
}

void check_kind(const gguf_file & file, const std::string & kind, const token_list & tokens) {
    for (const kind_check & c : checks) {
        if (kind == c.kind) {
            check_lengths(file, tokens);
            c.check(file, tokens);
        }
    }
}

} // namespace kvg
