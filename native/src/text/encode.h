// Text to token ids, by libllama's functions.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "kvgraph.h"
#include "text/special_tokens.h"

namespace kvg {

// A vocabulary of libllama's, as far as a long text needs it.
struct special_vocab {
    special_tokens all;
    special_tokens users; // the only ones that are looked for in text that names no control tokens
    uint64_t longest;     // bytes of the longest token's text, special or not
    bool strips;          // whether white space may be dropped
};

// error(KVG_INVALID_ARGUMENT) when a token has no text
special_vocab read_specials(const void * vocab, int32_t n_tokens, kvg_token_attr attr, kvg_token_text text);

// Writes the ids of a text into `ids`, as many as there is room for, and returns how many there are. Ends early, with no use of what it
// wrote, once another thread sets `stop`.
// error(KVG_INTERNAL) when libllama takes no text
uint64_t encode(const special_tokens & specials, const void * vocab, kvg_tokenize_text tokenize, std::string_view text,
                const volatile int32_t & stop, int32_t * ids, uint64_t room);

} // namespace kvg
