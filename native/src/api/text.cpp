// Long texts: their special tokens, and what is between them.
#include <limits>
#include <memory>

#include "api/handles.h"
#include "runtime/bounded.h"
#include "text/encode.h"

using namespace kvg;

struct kvg_specials {
    special_vocab vocab;
};

kvg_status kvg_specials_new(const void * vocab, int64_t n_tokens, kvg_token_attr attr, kvg_token_text text,
                            kvg_specials ** out) {
    return guarded([&] {
        need(out, "out") = nullptr;
        if (!attr || !text) {
            fail(KVG_INVALID_ARGUMENT, "a function of libllama is NULL");
        }
        const auto n = static_cast<int32_t>(bounded("n_tokens", n_tokens, 0, std::numeric_limits<int32_t>::max()));
        *out = std::make_unique<kvg_specials>(kvg_specials{read_specials(vocab, n, attr, text)}).release();
    });
}

void kvg_specials_free(kvg_specials * specials) { std::unique_ptr<kvg_specials>{specials}.reset(); }

uint64_t kvg_specials_longest(const kvg_specials * specials) { return specials ? specials->vocab.longest : 0; }

int32_t kvg_specials_strip(const kvg_specials * specials) { return specials && specials->vocab.strips; }

kvg_status kvg_specials_encode(const kvg_specials * specials, const void * vocab, kvg_tokenize_text tokenize, const char * text,
                               int64_t size, int32_t parse_special, const int32_t * stop, int32_t * ids, int64_t room,
                               uint64_t * n) {
    return guarded([&] {
        const special_vocab & own = need(specials, "specials").vocab;
        if (!tokenize) {
            fail(KVG_INVALID_ARGUMENT, "a function of libllama is NULL");
        }
        const int64_t most = std::numeric_limits<int32_t>::max(); // libllama's
        const std::string_view whole(&need(text, "text"), static_cast<size_t>(bounded("size", size, 0, most)));
        const auto space = static_cast<uint64_t>(bounded("room", room, 0, most));
        need(n, "n") =
            encode(parse_special ? own.all : own.users, vocab, tokenize, whole, need(stop, "stop"), &need(ids, "ids"), space);
    });
}
